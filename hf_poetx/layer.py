"""What a layer under POET-X holds, and how its transforms are merged into its weight."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from .base_weight import (
    QuantizedStash,
    copy_full_,
    fingerprint,
    frobenius_norm,
    full_tensor,
    join_error_bits,
    relative_change,
    row_normalize_,
    split_error_bits,
    with_norm,
)
from .config import PoetXConfig
from .ops.cayley import largest_singular_value
from .ops.rotation import Rotation
from .ops.skew import num_entries
from .rotation import draw_permutation, rotated_weight, split_width

SIDES = ("in", "out")
_ROTATION_NAMES = {
    side: (f"poetx_skew_{side}", f"poetx_skew_{side}_tail", f"poetx_permutation_{side}") for side in SIDES
}

# Largest singular value, about, of the skew matrices that ``init_weights=False`` draws.
RANDOM_SIGMA = 0.3


class LayerMerge(NamedTuple):
    """What a merge-then-reinitialise did to one layer.

    `sigma` is the largest singular value of its skew matrices; `jump` the relative change of the weight against the
    forward pass's own transform, about sigma^4, because the merge writes the exact one.
    """

    name: str
    sigma: float
    jump: float


class _Buffers(BufferDict):
    """Buffers that go where the module goes, but keep their dtype: casting a model must not round counts or figures."""

    def __init__(self) -> None:
        super().__init__({}, persistent=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = dict(self.items())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if self[name].dtype != buffer.dtype:
                self[name] = buffer.to(self[name].device)
        return self


class PoetXLayer(BaseTunerLayer):
    """What an adapted layer holds: for each adapter two rotations, and what a checkpoint must know of them.

    All containers are keyed by adapter. Skew entries are ``[num_blocks, block (block - 1) / 2]``, those of the smaller
    last block ``[1, rest (rest - 1) / 2]``; a side of a single column has none.
    """

    # PEFT takes every module whose name ends with a name in `modules_to_save` for one of them: no "norm" at an end here.
    adapter_layer_names = ("poetx_skew_in", "poetx_skew_in_tail", "poetx_skew_out", "poetx_skew_out_tail")
    buffer_names = (
        "poetx_permutation_in",
        "poetx_permutation_out",
        "poetx_merge_count",
        "poetx_settings",
        "poetx_fingerprint",
        "poetx_start_frobenius",
        "poetx_start_spectrum",
        "poetx_error_bits",
    )
    other_param_names = (*buffer_names, "poetx_config")

    def __init__(self, base_layer: nn.Module, name: str, quantization_backend: Any = None) -> None:
        self.base_layer = base_layer
        self.canonical_name = name
        self.quantization_backend = quantization_backend
        for container in self.adapter_layer_names:
            setattr(self, container, nn.ParameterDict())
        for container in self.buffer_names:
            setattr(self, container, _Buffers())
        self.poetx_config: dict[str, PoetXConfig] = {}
        # The base layer as it was before `merge`, so that `unmerge` restores it bit for bit.
        self._stash: Tensor | QuantizedStash | None = None
        # Set by training that may go back to a checkpoint from before the first merge.
        self.save_base_weight = False
        self._disable_adapters = False
        self._active_adapter = []
        self.merged_adapters = []
        self.cast_input_dtype_enabled = True
        base = self.get_base_layer()
        self.transposed = isinstance(base, Conv1D)
        if self.transposed:
            self.in_features, self.out_features = base.nx, base.nf
        else:
            self.in_features, self.out_features = base.in_features, base.out_features

    def width(self, side: str) -> int:
        """Number of features on a side, "in" or "out"."""
        return self.in_features if side == "in" else self.out_features

    def update_layer(self, adapter_name: str, config: PoetXConfig, inference_mode: bool = False) -> None:
        """Add an adapter: skew entries of zero, or small random ones for tests, under freshly drawn permutations.

        With zeros the layer computes what it did, unless ``init="normalize"`` normalizes its weight.
        """
        self.poetx_config[adapter_name] = config
        if self.quantization_backend is None and not self.get_base_layer().weight.is_meta:
            # Before normalization: it is the base model on disk that the adapter must be loaded onto.
            self.poetx_fingerprint[adapter_name] = self._first_fingerprint()
            # A first adapter of the same base has normalized it already; rounding would make a second time another.
            if config.init == "normalize" and len(self.poetx_config) == 1:
                row_normalize_(self.get_base_layer().weight, self.transposed)
            self._record_start(adapter_name, config)
        for side in SIDES:
            block, full, rest = split_width(self.width(side), config.block)
            if block >= 2:
                getattr(self, f"poetx_skew_{side}")[adapter_name] = self._new_skew(full, block, config)
            if rest >= 2:
                getattr(self, f"poetx_skew_{side}_tail")[adapter_name] = self._new_skew(1, rest, config)
            getattr(self, f"poetx_permutation_{side}")[adapter_name] = self._draw(config, side, merge_count=0)
        self.poetx_merge_count[adapter_name] = torch.zeros((), dtype=torch.int64)
        self.poetx_settings[adapter_name] = torch.tensor([config.block, config.seed, config.permutation_group])
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    @staticmethod
    def _new_skew(num_blocks: int, block: int, config: PoetXConfig) -> nn.Parameter:
        entries = torch.zeros(num_blocks, num_entries(block), dtype=getattr(torch, config.skew_dtype or "float32"))
        if not config.init_weights:
            # The largest singular value of a random skew matrix is about 2 std sqrt(block).
            entries.normal_(std=RANDOM_SIGMA / (2 * block**0.5))
        return nn.Parameter(entries)

    def _first_fingerprint(self) -> Tensor:
        """Fingerprint of the untouched base weight, which a first adapter may have normalized already."""
        for existing in self.poetx_fingerprint.values():
            return existing.clone()
        return fingerprint(self.get_base_layer().weight)

    def _record_start(self, adapter_name: str, config: PoetXConfig) -> None:
        weight = full_tensor(self.get_base_layer().weight).detach().float()
        self.poetx_start_frobenius[adapter_name] = frobenius_norm(weight)
        if config.track_spectrum:
            self.poetx_start_spectrum[adapter_name] = torch.linalg.svdvals(weight)
        if config.base_error_bits:
            _, self.poetx_error_bits[adapter_name] = split_error_bits(weight, self.get_base_layer().weight.dtype)

    def _draw(self, config: PoetXConfig, side: str, merge_count: int) -> Tensor:
        name = f"{self.canonical_name}.{side}"
        return draw_permutation(self.width(side), config.permutation_group, config.seed, name, merge_count)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to its layer's device; unlike PEFT's own it never changes a dtype."""
        if device is None:
            device, _ = self._get_base_layer_device_and_dtype(self.get_base_layer())
        if device is not None and device.type == "meta":
            # An offloaded layer: accelerate brings its weight to this device for the products.
            hook = getattr(self.get_base_layer(), "_hf_hook", None)
            device = getattr(hook, "execution_device", None)
        if device is None:
            return
        for name in self.adapter_layer_names + self.buffer_names:
            container = getattr(self, name)
            if adapter_name in container and not container[adapter_name].is_meta:
                tensor = container[adapter_name]
                moved = tensor.detach().to(device)
                if moved.device != tensor.device:
                    trained = tensor.requires_grad
                    container[adapter_name] = moved if name in self.buffer_names else nn.Parameter(moved, trained)

    def rotation(self, adapter_name: str, side: str) -> Rotation | None:
        """An adapter's rotation of a side, or None where a single column leaves nothing to rotate."""
        # Looked up in the modules' own dictionaries, ten times faster than attributes: the host bounds small layers.
        entries_name, tail_name, permutation_name = _ROTATION_NAMES[side]
        entries = self._modules[entries_name]._parameters.get(adapter_name)
        if entries is None:
            return None
        tail = self._modules[tail_name]._parameters.get(adapter_name)
        permutation = self._modules[permutation_name]._buffers[adapter_name]
        return Rotation(entries, tail, permutation, self.poetx_config[adapter_name].permutation_group)

    def _whole_rotation(self, adapter_name: str, side: str) -> Rotation | None:
        """The rotation with its skew entries gathered from all ranks."""
        rotation = self.rotation(adapter_name, side)
        if rotation is None:
            return None
        tail = None if rotation.tail is None else full_tensor(rotation.tail.detach())
        return rotation._replace(entries=full_tensor(rotation.entries.detach()), tail=tail)

    def skew_parameters(self, adapter_name: str) -> list[nn.Parameter]:
        """All trained skew entries of an adapter."""
        containers = (getattr(self, name) for name in self.adapter_layer_names)
        return [container[adapter_name] for container in containers if adapter_name in container]

    def check_finite(self, adapter_name: str) -> None:
        """Raise ValueError with the layer's name if a skew entry is NaN or infinite."""
        for parameter in self.skew_parameters(adapter_name):
            if not torch.isfinite(full_tensor(parameter.detach())).all():
                raise self._not_finite(adapter_name, "skew entries are NaN or infinite, nothing was merged")

    def _not_finite(self, adapter_name: str, what: str) -> ValueError:
        # The first sentence is PEFT's own, which its users look for.
        return ValueError(
            f"NaNs detected in the merged weights. The adapter {adapter_name} seems to be broken: layer "
            f"{self.canonical_name!r}, {what}; go back to the last checkpoint with a lower learning rate"
        )

    def base_weight(self, adapter_name: str | None = None) -> Tensor:
        """The base weight ``[out_features, in_features]``, whole, dequantized, with an adapter's error bits if kept."""
        weight = full_tensor(self.get_base_weight())
        # While merged the weight is another than the one that the bits belong to.
        if adapter_name in self.poetx_error_bits and not self.merged:
            if weight.dtype != torch.bfloat16:
                raise ValueError(
                    f"layer {self.canonical_name!r} has error bits of a bfloat16 base weight, which is {weight.dtype} now; "
                    "cast the model back to bfloat16"
                )
            weight = join_error_bits(weight, self.poetx_error_bits[adapter_name])
        return weight.mT if self.transposed else weight

    def effective_weight(self, adapter_name: str, exact: bool = False) -> Tensor:
        """Weight ``[out_features, in_features]`` of the plain layer that equals this one, fp32.

        Args:
            adapter_name: whose rotations to apply.
            exact: use the exactly orthogonal transform instead of the forward pass's polynomial.
        """
        rotations = (self._whole_rotation(adapter_name, side) for side in SIDES)
        return rotated_weight(self.base_weight(adapter_name), *rotations, exact=exact)

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """What `merge` adds to the base weight, in its own layout (transposed for `Conv1D`), fp32."""
        delta = self.effective_weight(adapter_name) - self.base_weight(adapter_name)
        return delta.mT if self.transposed else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write the forward pass's own effective weight into the base layer, keeping the old one for `unmerge`.

        Raises:
            ValueError: if a skew entry, or with `safe_merge` the result, is not finite; the weight is left as it was.
        """
        backend = self.quantization_backend
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name not in self.poetx_config:
                continue
            self.check_finite(adapter_name)
            if backend is not None:
                self._prepare_quantized_merge(backend)
            merged = self.effective_weight(adapter_name)
            if safe_merge and not torch.isfinite(merged).all():
                raise self._not_finite(adapter_name, "the weight would be NaN or infinite, it is left as it was")
            if self._stash is None:
                # On the CPU: vLLM synchronization merges during training, when a second copy may not fit on the GPU.
                self._stash = self._local_weight().to("cpu", copy=True) if backend is None else QuantizedStash(self)
            self._set_natural_weight(merged)
            self.merged_adapters.append(adapter_name)

    def _local_weight(self) -> Tensor:
        weight = self.get_base_layer().weight.detach()
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def _prepare_quantized_merge(self, backend: Any) -> None:
        if not backend.supports_merge:
            raise ValueError(
                f"layer {self.canonical_name!r}: {backend.backend_name} weights cannot be written, so nothing can be "
                "merged into them; load the base model without quantization to merge"
            )
        warnings.warn(
            f"merging into {backend.backend_name} weights rounds the result to their precision; load the base model "
            "without quantization to merge truly",
            stacklevel=3,
        )

    def _set_natural_weight(self, weight: Tensor) -> None:
        weight = weight.mT if self.transposed else weight
        if self.quantization_backend is None:
            copy_full_(self.get_base_layer().weight.data, weight)
        else:
            self.set_base_weight(weight.to(self.get_base_weight().dtype))

    def unmerge(self) -> None:
        """Undo `merge`, bit for bit.

        Raises:
            ValueError: if only periodic merges have changed the weight; those have no way back.
        """
        if not self.merged:
            if self.has_absorbed_merges:
                raise ValueError(
                    f"layer {self.canonical_name!r}: unmerge undoes merge_adapter() only; the periodic merges of "
                    "training have no way back. Train with PoetXConfig(merge_interval=0) to keep the base weights"
                )
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if isinstance(self._stash, QuantizedStash):
            self._stash.restore(self)
        else:
            self._local_weight().copy_(self._stash)
        self._stash = None
        self.merged_adapters.clear()

    @property
    def has_absorbed_merges(self) -> bool:
        """Whether periodic merges have changed the base weight, so that it is no longer the original."""
        return any(int(count) for count in self.poetx_merge_count.values())

    def check_reinitializable(self, adapter_name: str) -> None:
        """Raise ValueError with the layer's name if `merge_then_reinitialize` could not do it truly.

        That is if a skew entry is not finite, or the base weight is quantized, offloaded, or merged into for a time.
        """
        kind = None
        if self.quantization_backend is not None:
            kind = "quantized"
        elif self.get_base_layer().weight.is_meta:
            kind = "offloaded"
        if kind is not None:
            raise ValueError(
                f"the weight of layer {self.canonical_name!r} is {kind}, so periodic merges cannot be written into it; "
                "load the model otherwise, or use PoetXConfig(merge_interval=0)"
            )
        if self.merged:
            raise ValueError(
                "the adapter is merged by merge_adapter(); call unmerge_adapter() before training goes on"
            )
        self.check_finite(adapter_name)

    def _norm_at_start(self, adapter_name: str) -> Tensor:
        """Frobenius norm, 0-dim fp64, that merges keep; the adapter's file holds it."""
        if adapter_name not in self.poetx_start_frobenius or not int(self.poetx_merge_count[adapter_name]):
            # Sharded loading may have wrapped the model on this rank before its weights were there.
            self.poetx_start_frobenius[adapter_name] = frobenius_norm(self.base_weight(adapter_name))
        return self.poetx_start_frobenius[adapter_name]

    @torch.no_grad()
    def merge_then_reinitialize(self, adapter_name: str) -> LayerMerge:
        """Write the exactly rotated weight, then start over: skew entries of zero and new permutations.

        Before it is rounded, the weight is scaled to the norm that it had at the start: rounding to bf16 takes about
        1.4e-6 of the norm at every merge, always in the same direction, and of every singular value with it.

        All is written in place, so compiled graphs, CUDA graphs and optimizers keep what they hold. Whether it can be
        done must have been asked before, for all layers of the model: `check_reinitializable`.
        """
        sigma = max(
            (largest_singular_value(full_tensor(p)).max().item() for p in self.skew_parameters(adapter_name)),
            default=0.0,
        )
        exact = with_norm(self.effective_weight(adapter_name, exact=True), self._norm_at_start(adapter_name))
        jump = relative_change(self.effective_weight(adapter_name), exact)
        if adapter_name in self.poetx_error_bits:
            exact, error_bits = split_error_bits(exact, self.get_base_layer().weight.dtype)
            self.poetx_error_bits[adapter_name].copy_(error_bits.mT if self.transposed else error_bits)
        self._set_natural_weight(exact)
        self.reinitialize(adapter_name)
        return LayerMerge(self.canonical_name, sigma, jump)

    @torch.no_grad()
    def reinitialize(self, adapter_name: str) -> None:
        """Skew entries to zero, new permutations, one more merge counted."""
        count = int(self.poetx_merge_count[adapter_name]) + 1
        self.poetx_merge_count[adapter_name].fill_(count)
        for side in SIDES:
            permutation = getattr(self, f"poetx_permutation_{side}")[adapter_name]
            permutation.copy_(self._draw(self.poetx_config[adapter_name], side, count))
        for parameter in self.skew_parameters(adapter_name):
            parameter.zero_()
