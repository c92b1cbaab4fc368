"""The linear layer that POET-X puts in the place of a model's own: how activations pass through it."""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import onload_layer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .block_cache import BlockCache, can_keep_blocks
from .config import PoetXConfig
from .layer import SIDES, PoetXLayer
from .ops.fold import folding_pays
from .ops.poetx_linear import poetx_linear


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
        self._block_cache = BlockCache()
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``; the dtype is what the wrapped layer would return."""
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel copies no ParameterDict, so its replicas have no rotations: launch one process for each "
                "GPU with torchrun or accelerate launch, or show one GPU only with CUDA_VISIBLE_DEVICES"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        adapters = [name for name in self.active_adapters if name in self.poetx_config]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._block_cache.clear()
        if self.disable_adapters or self.merged or not adapters:
            return self.base_layer(x, *args, **kwargs)
        if len(adapters) == 1 and not args and not kwargs and self._is_plain(adapters[0]):
            return self._forward_plain(x, adapters[0])
        return self._forward_around(x, adapters, *args, **kwargs)

    def _is_plain(self, adapter_name: str) -> bool:
        """Whether the base layer is no more than weight and bias, not quantized, offloaded, hooked or wrapped."""
        base = self.base_layer
        hooks = base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks
        both_sides = adapter_name in self.poetx_skew_in and adapter_name in self.poetx_skew_out
        bare = self.quantization_backend is None and "_hf_hook" not in vars(base) and not hooks
        return bare and both_sides and type(base) in (nn.Linear, Conv1D)

    def _forward_plain(self, x: Tensor, adapter_name: str) -> Tensor:
        base, dtype, device = self.base_layer, x.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            x, dtype = x.to(torch.get_autocast_dtype(device)), torch.get_autocast_dtype(device)
        elif self.cast_input_dtype_enabled:
            x = x.to(base.weight.dtype)
        weight = base.weight.mT if self.transposed else base.weight
        rotation_in, rotation_out = (self.rotation(adapter_name, side) for side in SIDES)
        if not self.training and can_keep_blocks([rotation_in, rotation_out]):
            with torch.autocast(device, enabled=False):
                inner = F.linear(self._block_cache.rotate((adapter_name, "in"), x, rotation_in), weight.to(x.dtype))
                return self._block_cache.rotate((adapter_name, "out"), inner, rotation_out, base.bias).to(dtype)
        mode = self.poetx_config[adapter_name].memory_mode
        folded = self._folding_pays(x, adapter_name, mode)
        return poetx_linear(x, weight, base.bias, rotation_in, rotation_out, mode, folded).to(dtype)

    def _folding_pays(self, x: Tensor, adapter_name: str, memory_mode: str) -> bool:
        tokens = x.numel() // self.in_features
        block = min(self.poetx_config[adapter_name].block, max(self.in_features, self.out_features))
        return folding_pays(tokens, self.in_features, self.out_features, block, x.device.type, memory_mode)

    def _forward_around(self, x: Tensor, adapters: list[str], *args: Any, **kwargs: Any) -> Tensor:
        """Rotate around the base layer as a black box; several adapters act like merges in their order."""
        for adapter_name in reversed(adapters):
            x = self._rotate(x, adapter_name, "in")
        result = self.base_layer(x, *args, **kwargs)
        if self.quantization_backend is not None:
            result = self.quantization_backend.maybe_clone_base_result(result)
        bias = self._bias()
        # The base layer has added its bias already, which belongs outside of the rotations: z = R(y) + bias - R(bias).
        # The difference is exactly zero for the identity, so a freshly wrapped layer changes nothing.
        correction = None if bias is None else bias.to(result.device)
        for adapter_name in adapters:
            result = self._rotate(result, adapter_name, "out")
            correction = None if correction is None else self._rotate(correction, adapter_name, "out")
        return result if bias is None else result + (bias.to(result.device) - correction).to(result.dtype)

    def _rotate(self, x: Tensor, adapter_name: str, side: str) -> Tensor:
        rotation = self.rotation(adapter_name, side)
        if rotation is None:
            return x
        with torch.autocast(x.device.type, enabled=False):
            if not self.training and can_keep_blocks([rotation]):
                return self._block_cache.rotate((adapter_name, side), x, rotation)
            return rotation.apply(x)

    def train(self, mode: bool = True) -> nn.Module:
        """As any module's; blocks that were kept for evaluation are freed when training begins."""
        if mode:
            self._block_cache.clear()
        return super().train(mode)

    def _bias(self) -> Tensor | None:
        bias = getattr(self.get_base_layer(), "bias", None)
        if bias is None or not bias.is_meta:
            return bias
        with onload_layer(self):
            return self.get_base_layer().bias.clone()

    def extra_repr(self) -> str:
        blocks = {name: config.block for name, config in self.poetx_config.items()}
        return f"in_features={self.in_features}, out_features={self.out_features}, block={blocks}"

    def __repr__(self) -> str:
        return "poetx." + super().__repr__()
