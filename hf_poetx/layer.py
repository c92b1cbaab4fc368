"""The linear layer that POET-X puts in the place of a model's own."""

import warnings
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge, onload_layer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .base_weight import copy_full_, fingerprint, full_tensor, join_error_bits, row_normalize_, split_error_bits
from .config import PoetXConfig
from .ops.cayley import largest_singular_value
from .ops.poetx_linear import Rotation, poetx_linear
from .ops.skew import num_entries
from .rotation import draw_permutation, rotated_weight, split_width

SIDES = ("in", "out")


class LayerMerge(NamedTuple):
    """What a merge-then-reinitialise did to one layer.

    `sigma` is the largest singular value of its skew matrices; `jump` the relative change of the weight against the
    forward pass's own transform, about sigma^4, because the merge writes the exact one.
    """

    name: str
    sigma: float
    jump: float


class PoetXLayer(BaseTunerLayer):
    """What an adapted layer holds: for each adapter two rotations, and what a checkpoint must know of them.

    All containers are keyed by adapter. Skew entries are ``[num_blocks, block (block - 1) / 2]``, those of the smaller
    last block ``[1, rest (rest - 1) / 2]``; a side of a single column has none.
    """

    adapter_layer_names = ("poetx_skew_in", "poetx_skew_in_tail", "poetx_skew_out", "poetx_skew_out_tail")
    buffer_names = (
        "poetx_permutation_in",
        "poetx_permutation_out",
        "poetx_merge_count",
        "poetx_settings",
        "poetx_fingerprint",
        "poetx_start_norm",
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
            setattr(self, container, BufferDict({}, persistent=True))
        self.poetx_config: dict[str, PoetXConfig] = {}
        # Weights as they were before `merge`, newest last, so that `unmerge` restores them bit for bit.
        self.stashed_weights: list[Tensor] = []
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
        """Add an adapter that changes nothing yet: skew entries of zero under freshly drawn permutations."""
        self.poetx_config[adapter_name] = config
        weight = self.get_base_layer().weight
        plain = self.quantization_backend is None and weight.is_floating_point() and not weight.is_meta
        if plain:
            # Before normalisation: it is the base model on disk that the adapter must be loaded onto.
            self.poetx_fingerprint[adapter_name] = self._first_fingerprint()
            if config.init == "normalize":
                row_normalize_(weight, self.transposed)
            self._record_start(adapter_name, config)
        dtype = getattr(torch, config.skew_dtype)
        for side in SIDES:
            width = self.width(side)
            block, full, rest = split_width(width, config.block)
            if block >= 2:
                getattr(self, f"poetx_skew_{side}")[adapter_name] = nn.Parameter(
                    torch.zeros(full, num_entries(block), dtype=dtype)
                )
            if rest >= 2:
                getattr(self, f"poetx_skew_{side}_tail")[adapter_name] = nn.Parameter(
                    torch.zeros(1, num_entries(rest), dtype=dtype)
                )
            getattr(self, f"poetx_permutation_{side}")[adapter_name] = self._draw(config, side, merge_count=0)
        self.poetx_merge_count[adapter_name] = torch.zeros((), dtype=torch.int64)
        self.poetx_settings[adapter_name] = torch.tensor([config.block, config.seed, config.permutation_group])
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _first_fingerprint(self) -> Tensor:
        """Fingerprint of the untouched base weight, which a first adapter may have normalised already."""
        for existing in self.poetx_fingerprint.values():
            return existing.clone()
        return fingerprint(self.get_base_layer().weight)

    def _record_start(self, adapter_name: str, config: PoetXConfig) -> None:
        weight = full_tensor(self.get_base_layer().weight).detach().float()
        self.poetx_start_norm[adapter_name] = weight.norm().double()
        if config.track_spectrum:
            self.poetx_start_spectrum[adapter_name] = torch.linalg.svdvals(weight)
        if config.base_error_bits:
            narrow, error_bits = split_error_bits(weight, self.get_base_layer().weight.dtype)
            del narrow
            self.poetx_error_bits[adapter_name] = error_bits

    def _draw(self, config: PoetXConfig, side: str, merge_count: int) -> Tensor:
        name = f"{self.canonical_name}.{side}"
        return draw_permutation(self.width(side), config.permutation_group, config.seed, name, merge_count)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to its layer's device; unlike PEFT's own it never changes a dtype."""
        if device is None:
            device = self.get_base_layer().weight.device
        if device.type == "meta":
            return
        for name in self.adapter_layer_names + self.buffer_names:
            container = getattr(self, name)
            if adapter_name in container and not container[adapter_name].is_meta:
                moved = container[adapter_name].to(device)
                if moved is not container[adapter_name]:
                    container[adapter_name] = moved if name in self.buffer_names else nn.Parameter(moved.detach())

    def rotation(self, adapter_name: str, side: str) -> Rotation | None:
        """An adapter's rotation of a side, or None where a single column leaves nothing to rotate."""
        entries = getattr(self, f"poetx_skew_{side}")
        if adapter_name not in entries:
            return None
        tails = getattr(self, f"poetx_skew_{side}_tail")
        tail = tails[adapter_name] if adapter_name in tails else None
        permutation = getattr(self, f"poetx_permutation_{side}")[adapter_name]
        group = self.poetx_config[adapter_name].permutation_group
        return Rotation(entries[adapter_name], tail, permutation, group)

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
                raise ValueError(
                    f"layer {self.canonical_name!r}, adapter {adapter_name!r}: skew entries are NaN or infinite, "
                    "refusing to merge them into the weight; go back to the last checkpoint with a lower learning rate"
                )

    def base_weight(self, adapter_name: str | None = None) -> Tensor:
        """The base weight ``[out_features, in_features]``, whole, dequantized, with an adapter's error bits if kept."""
        weight = full_tensor(self.get_base_weight())
        if adapter_name is not None and adapter_name in self.poetx_error_bits:
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
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name not in self.poetx_config:
                continue
            self.check_finite(adapter_name)
            backend = self.quantization_backend
            if backend is not None and not backend.supports_merge:
                raise ValueError(f"layer {self.canonical_name!r}: {type(backend).__name__} weights cannot be merged")
            merged = self.effective_weight(adapter_name)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"NaNs detected in the merged weights of adapter {adapter_name!r}")
            before = self.get_base_weight()
            # On the CPU: vLLM synchronisation merges during training, when a second copy may not fit on the GPU.
            self.stashed_weights.append(before.detach().to("cpu", copy=True))
            self._set_natural_weight(merged)
            self.merged_adapters.append(adapter_name)

    def _set_natural_weight(self, weight: Tensor) -> None:
        weight = weight.mT if self.transposed else weight
        if self.quantization_backend is None:
            copy_full_(self.get_base_layer().weight.data, weight)
        else:
            self.set_base_weight(weight.to(self.get_base_weight().dtype))

    def unmerge(self) -> None:
        """Undo `merge`, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        while self.merged_adapters:
            self.merged_adapters.pop()
            before = self.stashed_weights.pop()
            if self.quantization_backend is None:
                target = self.get_base_layer().weight.data
                target.copy_(before.to(target.device))
            else:
                self.set_base_weight(before.to(self.get_base_layer().weight.device))

    @torch.no_grad()
    def merge_then_reinitialize(self, adapter_name: str) -> LayerMerge:
        """Write the exactly rotated weight, then start over: skew entries of zero and new permutations.

        All is written in place, so compiled graphs, CUDA graphs and optimizers keep what they hold.
        """
        sigma = max(
            (largest_singular_value(full_tensor(p)).max().item() for p in self.skew_parameters(adapter_name)),
            default=0.0,
        )
        polynomial = self.effective_weight(adapter_name)
        exact = self.effective_weight(adapter_name, exact=True)
        jump = ((exact - polynomial).norm() / polynomial.norm()).item()
        if adapter_name in self.poetx_error_bits:
            natural = exact.mT if self.transposed else exact
            narrow, error_bits = split_error_bits(natural, self.get_base_layer().weight.dtype)
            self.get_base_layer().weight.copy_(narrow)
            self.poetx_error_bits[adapter_name].copy_(error_bits)
        else:
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


class PoetXLinear(nn.Module, PoetXLayer):
    """A linear layer (`nn.Linear`, `Conv1D` or a quantized one) between two trained rotations."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        name: str,
        config: PoetXConfig,
        quantization_backend: Any = None,
    ) -> None:
        super().__init__()
        PoetXLayer.__init__(self, base_layer, name, quantization_backend)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``; the dtype is what the wrapped layer would return."""
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("POET-X cannot mix adapters within a batch; call the model once for each adapter")
        if self.disable_adapters and self.merged:
            self.unmerge()
        adapters = [name for name in self.active_adapters if name in self.poetx_config]
        if self.disable_adapters or self.merged or not adapters:
            return self.base_layer(x, *args, **kwargs)
        if len(adapters) == 1 and self._is_plain() and not args and not kwargs:
            return self._forward_plain(x, adapters[0])
        return self._forward_around(x, adapters, *args, **kwargs)

    def _is_plain(self) -> bool:
        """Whether the base layer is no more than its weight and bias: not quantized, offloaded, hooked or wrapped."""
        base = self.base_layer
        return (
            type(base) in (nn.Linear, Conv1D)
            and not hasattr(base, "_hf_hook")
            and not base._forward_hooks
            and not base._forward_pre_hooks
        )

    def _forward_plain(self, x: Tensor, adapter_name: str) -> Tensor:
        base, dtype, device = self.base_layer, x.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            x, dtype = x.to(torch.get_autocast_dtype(device)), torch.get_autocast_dtype(device)
        elif self.cast_input_dtype_enabled:
            x = x.to(base.weight.dtype)
        weight = base.weight.mT if self.transposed else base.weight
        rotation_in, rotation_out = (self.rotation(adapter_name, side) for side in SIDES)
        mode = self.poetx_config[adapter_name].memory_mode
        return poetx_linear(x, weight, base.bias, rotation_in, rotation_out, mode).to(dtype)

    def _forward_around(self, x: Tensor, adapters: list[str], *args: Any, **kwargs: Any) -> Tensor:
        """Rotate around the base layer as a black box; several adapters act like merges in their order."""
        for adapter_name in reversed(adapters):
            x = _rotate(x, self.rotation(adapter_name, "in"))
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        bias = self._bias_for(result)
        result = result if bias is None else result - bias
        for adapter_name in adapters:
            result = _rotate(result, self.rotation(adapter_name, "out"))
        return (result if bias is None else result + bias).to(dtype)

    def _bias_for(self, result: Tensor) -> Tensor | None:
        """The bias that the base layer added, which stays outside the rotations."""
        bias = getattr(self.get_base_layer(), "bias", None)
        if bias is None:
            return None
        if bias.is_meta:
            with onload_layer(self):
                bias = self.get_base_layer().bias.clone()
        return bias.to(result.device, result.dtype)

    def extra_repr(self) -> str:
        blocks = {name: config.block for name, config in self.poetx_config.items()}
        return f"in_features={self.in_features}, out_features={self.out_features}, block={blocks}"

    def __repr__(self) -> str:
        return "poetx." + super().__repr__()


def _rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    if rotation is None:
        return x
    with torch.autocast(x.device.type, enabled=False):
        return rotation.apply(x)
