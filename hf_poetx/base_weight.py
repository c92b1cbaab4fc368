"""The frozen base weight of a layer: reading and writing it whole, its fingerprint, its error bits."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

# Elements of a weight that its fingerprint looks at.
FINGERPRINT_SAMPLES = 65_536


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over ranks; a collective call if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_full_(target: Tensor, source: Tensor) -> None:
    """Write a whole tensor into one that may be sharded over ranks, keeping its storage, dtype and placement."""
    source = source.to(target.dtype)
    if isinstance(target, DTensor):
        sharded = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(sharded.to_local())
    else:
        target.copy_(source)


@torch.no_grad()
def row_normalize_(weight: Tensor, transposed: bool) -> None:
    """Scale every output's weights to the norm 1, in place; rows of zeros stay.

    Args:
        weight: ``[out_features, in_features]``, or the transpose of it.
        transposed: whether it is the transpose (`Conv1D`).
    """
    whole = full_tensor(weight).float()
    norms = whole.norm(dim=0 if transposed else 1, keepdim=True)
    copy_full_(weight, whole / torch.where(norms > 0, norms, 1))


def frobenius_norm(weight: Tensor) -> Tensor:
    """0-dim fp64: a sum in fp32 would be off by more than what a merge changes."""
    return torch.linalg.vector_norm(weight, dtype=torch.float64)


def with_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """A weight scaled to a Frobenius norm; zeros stay."""
    own = frobenius_norm(weight)
    return weight * torch.where(own > 0, norm / own, 1).to(weight.dtype)


def relative_change(before: Tensor, after: Tensor) -> float:
    """Frobenius norm of the difference over that of `before`; the norm itself where `before` is zero."""
    norm = before.norm()
    return ((after - before).norm() / torch.where(norm > 0, norm, 1)).item()


@torch.no_grad()
def fingerprint(weight: Tensor) -> Tensor:
    """Hash of evenly spaced elements of a weight, rounded to bf16 so that it is the same for a model loaded in fp32.

    Returns:
        0-dim int64 on the CPU, never negative.
    """
    flat = full_tensor(weight).detach().reshape(-1)
    step = max(1, flat.numel() // FINGERPRINT_SAMPLES)
    bits = flat[::step].to("cpu", torch.bfloat16).view(torch.int16).long()
    # An odd multiplier for each position makes the sum depend on the order; int64 wraps around.
    positions = torch.arange(bits.numel(), dtype=torch.int64)
    mixed = (bits + 32_768) * ((positions * 2 + 1) * 2_654_435_761) + positions
    mixed = mixed ^ (mixed >> 29)
    return (mixed * 1_099_511_628_211).sum() & 0x7FFF_FFFF_FFFF_FFFF


def split_error_bits(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round an fp32 weight to bf16 and keep 8 more bits of it.

    Integer arithmetic on the bit patterns: the bf16 weight is ``master.to(bfloat16)``, to nearest and ties to even, and
    its error ``(bits - (narrow << 16)) / 2^8``, rounded likewise and kept within 127 on both sides, so that splitting
    what was joined changes nothing. Together they are off by half a unit of the 24 bits at most, next to a tie by one.

    Args:
        master: fp32, any shape, finite.
        dtype: must be `torch.bfloat16`.

    Returns:
        The bf16 weight and its int8 error bits, both of the same shape.

    Source: FlashOptim, weight splitting by units in the last place.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"base_error_bits needs a bfloat16 base weight, got {dtype}; load the model in bfloat16")
    master = master.float().contiguous()
    narrow = master.to(dtype)
    rest = master.view(torch.int32).long() - (narrow.view(torch.int16).long() << 16)
    error = (rest + 0x7F + ((rest >> 8) & 1)) >> 8
    return narrow, error.clamp(-127, 127).to(torch.int8)


def join_error_bits(narrow: Tensor, error_bits: Tensor) -> Tensor:
    """The fp32 weight that a bf16 weight and its error bits stand for; inverse of `split_error_bits` to 24 bits."""
    upper = (narrow.contiguous().view(torch.int16).long() << 8) + error_bits.long()
    return (upper << 8).to(torch.int32).view(torch.float32)


class QuantizedStash:
    """A quantized base layer as it is now, so that it can be put back bit for bit after weights were written into it.

    PEFT's quantization backends never write in place: they replace the layer's parameters, or the layer itself, and
    reset flags. So references are enough, and nothing is copied.

    Args:
        layer: a PEFT layer, with `base_layer` and `get_base_layer()`.
    """

    def __init__(self, layer: Any) -> None:
        base = layer.get_base_layer()
        self._base_layer, self._parameters = layer.base_layer, dict(base._parameters)
        self._flags = {name: dict(vars(p)) for name, p in self._parameters.items() if p is not None}
        # Where an 8-bit layer of bitsandbytes keeps its codes after the first forward pass.
        self._state = copy.copy(getattr(base, "state", None))

    def restore(self, layer: Any) -> None:
        """Put it back into `layer`."""
        layer.base_layer = self._base_layer
        base = layer.get_base_layer()
        for name, parameter in self._parameters.items():
            # torchao's backend leaves the weight as a plain attribute.
            vars(base).pop(name, None)
            base._parameters[name] = parameter
            if parameter is not None:
                vars(parameter).update(self._flags[name])
        if self._state is not None:
            base.state = self._state
