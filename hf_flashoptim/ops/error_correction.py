"""Error bits: a 24- or 32-bit master weight kept as a 16-bit parameter and an int8 or int16 correction.

bf16 works on the bit pattern of the fp32 master: ``B = (bits + 0x8000) >> 16`` is the parameter (rounded to nearest,
ties away from zero), ``e = bits - (B << 16)`` the error bits; with int16 every finite fp32 comes back exactly. With
int8 the master is first rounded to its upper 24 bits (never up to inf), so it is off by at most ULP / 512 of the
parameter. NaN stays NaN; a master that bf16 can't hold has the parameter inf and still comes back.

fp16 works on values: ``e = round((master - narrow) / u)`` with u = ULP(narrow) / 2^16 (int16) or / 2^8 (int8). With
int16, masters with 2^-17 <= |x| <= 65504 come back exactly and smaller ones within 2^-41; larger ones saturate.

Whatever error bits accompany a parameter that was changed from outside, they move it by at most half a ULP.

Source: FlashOptim (2026), equations 1 and 2 and algorithm 1, here in integer arithmetic.
"""

import math

import torch
from torch import Tensor

ERROR_DTYPES = {24: torch.int8, 32: torch.int16}
_INF_BITS = 0x7F800000
_BF16_NAN_BITS = 0x7FC0
_FP16_MAX = torch.finfo(torch.float16).max


def split_master_weight(master: Tensor, dtype: torch.dtype, error_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split an fp32 master weight into a parameter of ``dtype`` (bf16 or fp16) and int8 or int16 error bits."""
    if dtype == torch.float16:
        return _split_fp16(master, error_dtype)
    ordinary = _is_ordinary(master)
    bits = master.view(torch.int32)
    if error_dtype == torch.int8:
        upper = _upper_24_bits(bits, ordinary)
        errors = upper.to(torch.int8)  # upper - (narrow << 8) is its lowest byte as a signed number
        narrow = upper.add_(0x80).bitwise_right_shift_(8).to(torch.int16)
    else:
        errors = bits.to(torch.int16)  # likewise, the lower half
        narrow = (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16)
    if not ordinary:
        narrow.masked_fill_(master.isnan(), _BF16_NAN_BITS)
        errors.masked_fill_(master.isfinite().logical_not_(), 0)
    return narrow.view(torch.bfloat16), errors


def compute_error_bits(master: Tensor, narrow: Tensor, error_dtype: torch.dtype) -> Tensor:
    """Error bits that bring ``narrow`` (bf16 or fp16, however it was rounded) as close to the fp32 master as they can.

    A ``narrow`` that rounded a tie to even may miss the master by one step of the error bits.
    """
    if narrow.dtype == torch.float16:
        errors = _fp16_error(master, narrow, error_dtype)
        return errors.nan_to_num_(0.0).clamp_(max=torch.iinfo(error_dtype).max).to(error_dtype)
    bits = master.view(torch.int32)
    narrow_bits = narrow.view(torch.int16).to(torch.int32)
    if error_dtype == torch.int8:
        errors = _upper_24_bits(bits, ordinary=False).sub_(narrow_bits.bitwise_left_shift_(8))
    else:
        errors = bits - narrow_bits.bitwise_left_shift_(16)
    limits = torch.iinfo(error_dtype)
    errors = errors.clamp_(limits.min, limits.max).to(error_dtype)
    return errors.masked_fill_(master.isfinite().logical_not_(), 0)


def reconstruct_master_weight(narrow: Tensor, errors: Tensor) -> Tensor:
    """The fp32 master weight of a bf16 or fp16 parameter and its int8 or int16 error bits."""
    if narrow.dtype == torch.float16:
        steps = errors.to(torch.float32).mul_(_power_of_two(narrow, -_error_width(errors.dtype)))
        return steps.add_(narrow)
    bits = narrow.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    step = 1 << (16 - _error_width(errors.dtype))
    master = bits.add_(errors, alpha=step).view(torch.float32)
    if _is_ordinary(master):
        return master
    # A parameter set to 0 or inf from outside may become NaN with the error bits that it finds.
    return torch.where(master.isnan(), narrow.to(torch.float32), master)


def _is_ordinary(values: Tensor) -> bool:
    """Whether there is no NaN, inf, or number near fp32's largest: one cheap question that spares many masks."""
    flat = values.reshape(-1)
    return math.isfinite(torch.dot(flat, flat))


def _error_width(error_dtype: torch.dtype) -> int:
    return torch.iinfo(error_dtype).bits


def _upper_24_bits(bits: Tensor, ordinary: bool) -> Tensor:
    """The upper 24 bits of fp32 bit patterns, rounded to nearest, ties away from zero, but never up to inf."""
    if ordinary:
        return (bits + 0x80).bitwise_right_shift_(8)
    # Rounding up from the last 24-bit number below inf would make it inf: those magnitudes are truncated instead.
    room = (bits & 0x7FFFFFFF).sub_(_INF_BITS - 0x80).bitwise_right_shift_(31)
    return room.bitwise_and_(0x80).add_(bits).bitwise_right_shift_(8)


def _split_fp16(master: Tensor, error_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    finite = master.isfinite()
    master = torch.where(finite, master.clamp(-_FP16_MAX, _FP16_MAX), master)
    narrow = master.to(torch.float16)
    errors = _fp16_error(master, narrow, error_dtype)
    # Error bits reach from -1/2 ULP to just below +1/2: what lies beyond belongs to the next parameter above.
    beyond = errors > torch.iinfo(error_dtype).max
    bits = narrow.view(torch.int16)
    above = torch.where(bits < 0, bits - 1, bits + 1).view(torch.float16)
    narrow = torch.where(beyond, above, narrow)
    errors = torch.where(beyond, _fp16_error(master, narrow, error_dtype), errors)
    return narrow, torch.where(finite, errors, 0.0).to(error_dtype)


def _fp16_error(master: Tensor, narrow: Tensor, error_dtype: torch.dtype) -> Tensor:
    """``(master - narrow) / u`` in fp32, rounded to nearest and clamped from below, not from above."""
    errors = (master - narrow).mul_(_power_of_two(narrow, _error_width(error_dtype), inverse=True))
    return errors.round_().clamp_(min=torch.iinfo(error_dtype).min)


def _power_of_two(narrow: Tensor, exponent: int, inverse: bool = False) -> Tensor:
    """``ULP(narrow) * 2^exponent`` for fp16, or with ``inverse`` ``2^exponent / ULP(narrow)``, in fp32."""
    ulp_exponent = (narrow.view(torch.int16).to(torch.int32) >> 10).bitwise_and_(31).clamp_(min=1).sub_(25)
    signed = ulp_exponent.neg_() if inverse else ulp_exponent
    return signed.add_(127 + exponent).bitwise_left_shift_(23).view(torch.float32)
