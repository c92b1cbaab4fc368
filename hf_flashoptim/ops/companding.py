"""Companded 8-bit moments: int8 codes for the first moment, uint8 codes for the second, one bf16 scale a group of 32.

First moment m with group scale S: ``x = m / S``, ``code = round(127 * 2x / (1 + |x|))``. Second moment v, held as its
root s: ``code = round(255 * s / S)``, at least 1 where s > 0: an element far below its group's maximum must not lose
its variance while it keeps its momentum, else its next update explodes. Rounding is to nearest, ties to even; to divide
by S is to multiply by the fp32 number nearest to 1 / S.

In a step, the second moment's codes are rounded with a dither, one number d(t) for all elements:
``code = round(255 * s / S + d(t))``. At beta2 = 0.999 and without gradients s falls by 0.05% a step, at most an eighth of
a code: rounding to nearest would never let it fall, and a run whose gradients shrink would be stuck with step sizes that
are too small.

S is the group's largest magnitude rounded to bf16 and clamped to bf16's normal numbers, so it neither vanishes nor
overflows. The first moment's is rounded to nearest, and its codes are clamped where S was rounded down. The second
moment's is rounded up, as clamped codes are a loss that a slow mean would gather. A group that holds inf or NaN gets the
scale NaN: all of it decodes to NaN, whatever its codes are, and no other group is touched.

Source: FlashOptim (2026), algorithms 2 and 3, with bf16 in place of fp16 scales, the floor of 1,
the dither, and the second moment's scale rounded up.
"""

import torch
from torch import Tensor

from hf_flashoptim.ops.layout import GROUP_SIZE, from_groups, rows_and_cols, scale_shape, to_groups

SCALE_DTYPE = torch.bfloat16
_SCALE_MIN = torch.finfo(SCALE_DTYPE).tiny
_SCALE_MAX = torch.finfo(SCALE_DTYPE).max


def group_scale(largest: Tensor) -> Tensor:
    """Scale for groups with these largest magnitudes: bf16, within its normal range, NaN where not finite.

    Args:
        largest: fp32, any shape, not negative.
    """
    # inf * 0 is NaN; rounding to bf16 comes last and cannot leave the clamped range, whose ends bf16 holds exactly.
    return torch.add(largest.clamp(_SCALE_MIN, _SCALE_MAX), largest * 0).to(SCALE_DTYPE)


def group_scale_rounded_up(largest: Tensor) -> Tensor:
    """``group_scale``, but rounded up, except for what lies above a bf16 number by 256 fp32 ULPs or less.

    A scale's own decoded value may be off by an ULP, near the smallest scales by 128, and must not move it.
    """
    bits = largest.clamp(_SCALE_MIN, _SCALE_MAX).view(torch.int32)
    rounded = bits.add_(0x10000 - 256 - 1).bitwise_and_(-0x10000).view(torch.float32)
    return rounded.add_(largest * 0).to(SCALE_DTYPE)


def encode_first_moment(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a first moment ``[rows, cols]`` in fp32.

    Returns:
        Codes int8 ``[rows, cols]`` within +-127, and scales bf16 ``[rows, ceil(cols / 32)]``.
    """
    groups = to_groups(values)
    scale = group_scale(groups.abs().amax(-1))
    x = groups * scale.float().reciprocal_().unsqueeze(-1)
    companded = x.div_(x.abs().add_(1.0)).mul_(254.0)
    codes = companded.round_().clamp_(-127.0, 127.0).to(torch.int8)
    return from_groups(codes, values.shape[1]), scale


def decode_first_moment(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode ``encode_first_moment``: ``z = code / 127``, ``m = S * z / (2 - |z|)``, fp32 ``[rows, cols]``."""
    z = to_groups(codes).to(torch.float32)
    values = z.div_(z.abs().neg_().add_(254.0)).mul_(scale.unsqueeze(-1))
    return from_groups(values, codes.shape[1])


# 2^32 over the golden ratio, whose multiples fill the unit interval evenly however many there are.
_DITHER_STRIDE = 2654435769


def second_moment_dither(step: float) -> float:
    """What is added to the second moment's codes before they are rounded in step t: within +-1/2, exact in fp32.

    Example:
        >>> [round(second_moment_dither(t), 3) for t in (1, 2, 3, 4)]
        [0.118, -0.264, 0.354, -0.028]
    """
    high = (int(step) * _DITHER_STRIDE % 2**32) >> 8
    return (2 * high + 1 - 2**24) * 2**-25


def encode_second_moment(root: Tensor, dither: float = 0.0) -> tuple[Tensor, Tensor]:
    """Encode the root of a second moment ``[rows, cols]`` in fp32, not negative.

    Args:
        root: fp32 ``[rows, cols]``.
        dither: added to the codes before rounding.

    Returns:
        Codes uint8 ``[rows, cols]``, 0 only where the root is 0, and scales bf16 ``[rows, ceil(cols / 32)]``.
    """
    groups = to_groups(root)
    scale = group_scale_rounded_up(groups.amax(-1))
    codes = (groups * scale.float().reciprocal_().unsqueeze(-1)).mul_(255.0).add_(dither).round_().clamp_(max=255.0)
    codes = torch.maximum(codes, groups.sign(), out=codes).to(torch.int32).to(torch.uint8)
    return from_groups(codes, root.shape[1]), scale


def decode_second_moment(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode ``encode_second_moment``: ``s = S * code / 255``, the root, fp32 ``[rows, cols]``."""
    values = to_groups(codes).to(torch.float32).mul_((scale.float() * (1 / 255)).unsqueeze(-1))
    return from_groups(values, codes.shape[1])


def quantize_first_moment(moment: Tensor) -> tuple[Tensor, Tensor]:
    """``encode_first_moment`` for a tensor of two or more dimensions: codes of its shape, scales of ``scale_shape``."""
    codes, scale = encode_first_moment(moment.float().reshape(rows_and_cols(moment.shape)))
    return codes.reshape(moment.shape).contiguous(), scale.reshape(scale_shape(moment.shape))


def dequantize_first_moment(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of ``quantize_first_moment``, fp32."""
    return decode_first_moment(*_as_rows(codes, scale)).reshape(codes.shape).contiguous()


def quantize_second_moment(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a second moment v (not its root) of two or more dimensions."""
    codes, scale = encode_second_moment(moment.float().sqrt().reshape(rows_and_cols(moment.shape)))
    return codes.reshape(moment.shape).contiguous(), scale.reshape(scale_shape(moment.shape))


def dequantize_second_moment(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of ``quantize_second_moment``: v in fp32, squares saturating at fp32's largest number."""
    return saturating_square(decode_second_moment(*_as_rows(codes, scale))).reshape(codes.shape).contiguous()


def saturating_square(root: Tensor) -> Tensor:
    """``root ** 2`` that stays finite for every finite root (inf and NaN pass)."""
    square = root.square()
    return torch.where(root.isfinite(), square.clamp(max=torch.finfo(square.dtype).max), square)


def _as_rows(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = rows_and_cols(codes.shape)
    return codes.reshape(rows, cols), scale.reshape(rows, -(-cols // GROUP_SIZE))
