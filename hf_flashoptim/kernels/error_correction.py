"""Device functions for error bits: the formulas of ``ops/error_correction.py`` on tiles.

Parameters in bf16 are bit patterns (int16) here; in fp16, values.
"""

import triton
import triton.language as tl

from hf_flashoptim.kernels.companding import bits_of, value_of

LARGEST_FP16 = tl.constexpr(65504.0)
# The first number that rounds to inf when it is rounded to its upper 24 bits.
TOP_24_BIT = tl.constexpr(3.402797707725092e38)


@triton.jit
def join_bf16(narrow, errors):
    """The fp32 master weights of bf16 bit patterns (int16) and their error bits (int8 or int16)."""
    bits = narrow.to(tl.int32) << 16
    joined = value_of(bits + (errors.to(tl.int32) << (16 - errors.dtype.primitive_bitwidth)))
    # A parameter set to 0 or inf from outside may become NaN with the error bits that it finds.
    return tl.where(joined == joined, joined, value_of(bits))


@triton.jit
def split_bf16(master, ERROR: tl.constexpr):
    """bf16 bit patterns (int16) and error bits of fp32 master weights.

    Rounded to 24 bits, M, the parameter is ``(M + 128) >> 8`` and its error bits are the low byte of M.
    """
    bits = tl.minimum(
        bits_of(master), 0x7FC00000
    )  # NaN as arithmetic makes it, so that adding to it can't wrap around
    if ERROR == tl.int8:
        bits += tl.where(tl.abs(master) < TOP_24_BIT, 0x80, 0)
        errors = (bits >> 8).to(tl.int8)
    else:
        errors = bits.to(tl.int16)
    return ((bits + 0x8000) >> 16).to(tl.int16), errors


@triton.jit
def join_fp16(narrow, errors):
    """The fp32 master weights of fp16 parameters and their error bits."""
    unit = _power_of_two(narrow, -errors.dtype.primitive_bitwidth)
    return tl.fma(errors.to(tl.float32), unit, narrow.to(tl.float32))


@triton.jit
def split_fp16(master, ERROR: tl.constexpr):
    """fp16 parameters and error bits of fp32 master weights."""
    finite = (master - master) == 0.0
    master = tl.where(finite, tl.minimum(tl.maximum(master, -LARGEST_FP16), LARGEST_FP16), master)
    narrow = master.to(tl.float16)
    errors = _fp16_errors(master, narrow, ERROR)
    # Error bits reach from -1/2 ULP to just below +1/2: what lies beyond belongs to the next parameter above.
    beyond = errors > (1 << (ERROR.primitive_bitwidth - 1)) - 1.0
    pattern = narrow.to(tl.int16, bitcast=True)
    above = tl.where(pattern < 0, pattern - 1, pattern + 1).to(tl.int16).to(tl.float16, bitcast=True)
    narrow = tl.where(beyond, above, narrow)
    errors = tl.where(beyond, _fp16_errors(master, narrow, ERROR), errors)
    return narrow, tl.where(finite, errors, 0.0).to(ERROR)


@triton.jit
def _fp16_errors(master, narrow, ERROR: tl.constexpr):
    errors = (master - narrow.to(tl.float32)) * _inverse_power_of_two(narrow, ERROR.primitive_bitwidth)
    rounded = (errors + 12582912.0) - 12582912.0
    return tl.maximum(rounded, -1.0 * (1 << (ERROR.primitive_bitwidth - 1)))


@triton.jit
def _ulp_exponent(narrow):
    exponent = (narrow.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 31
    return tl.maximum(exponent, 1) - 25


@triton.jit
def _power_of_two(narrow, EXPONENT: tl.constexpr):
    """``ULP(narrow) * 2^EXPONENT`` in fp32."""
    return value_of((_ulp_exponent(narrow) + (127 + EXPONENT)) << 23)


@triton.jit
def _inverse_power_of_two(narrow, EXPONENT: tl.constexpr):
    """``2^EXPONENT / ULP(narrow)`` in fp32."""
    return value_of(((127 + EXPONENT) - _ulp_exponent(narrow)) << 23)
