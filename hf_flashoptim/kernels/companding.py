"""Device functions for companded 8-bit moments: the formulas of ``ops/companding.py`` on tiles ``[groups, 32]``.

A scale is loaded and stored as the bit pattern of its bf16 (int16) and handled as the fp32 value of it.
"""

import triton
import triton.language as tl

ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_BITS = tl.constexpr(0x00800000)
LARGEST_BF16_BITS = tl.constexpr(0x7F7F0000)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Adding it leaves a number below 2^22 rounded to nearest, ties to even, in the low bits of the sum.
ROUNDING_SHIFT = tl.constexpr(12582912.0)


@triton.jit
def bits_of(values):
    """Bit patterns (int32) of fp32 values."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def value_of(bits):
    """The fp32 values of bit patterns (int32)."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(values):
    """Bit patterns (int16) of fp32 values rounded to bf16, ties to even; in integers, as the interpreter truncates."""
    bits = bits_of(values)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def group_scale(largest_bits):
    """Scales of groups whose largest magnitudes have these bit patterns, which keep their order and that of NaN."""
    bounded = tl.minimum(tl.maximum(largest_bits, SMALLEST_BITS), LARGEST_BF16_BITS)
    rounded = (bounded + 0x7FFF + ((bounded >> 16) & 1)) & -0x10000
    return value_of(tl.where(largest_bits < INF_BITS, rounded, NAN_BITS))


@triton.jit
def decode_first_moment(codes, scale):
    """``scale * z / (2 - |z|)`` with ``z = codes / 127``."""
    z = codes.to(tl.float32)
    denominator = 254.0 - tl.abs(z)
    # Triton divides in 8 instructions. This takes 5 and rounds correctly for all 255 codes (tested on the GPU).
    reciprocal = tl.rsqrt(denominator * denominator)
    quotient = z * reciprocal
    quotient = tl.fma(tl.fma(-denominator, quotient, z), reciprocal, quotient)
    return quotient * scale[:, None]


@triton.jit
def encode_first_moment(values):
    """Codes ``round(127 * 2x / (1 + |x|))`` with ``x = values / scale``, and the scales."""
    scale = group_scale(tl.max(bits_of(values) & ABS_MASK, axis=1))
    x = values * tl.div_rn(1.0, scale)[:, None]
    denominator = 1.0 + tl.abs(x)
    reciprocal = tl.rsqrt(denominator * denominator)
    reciprocal = tl.fma(tl.fma(-denominator, reciprocal, 1.0), reciprocal, reciprocal)
    signed_factor = value_of((bits_of(x) & ~ABS_MASK) | 0x437E0000)  # 254 with the sign of x
    codes = bits_of((1.0 - reciprocal) * signed_factor + ROUNDING_SHIFT)
    return codes.to(tl.int8), scale


@triton.jit
def decode_second_moment(codes, scale):
    """The root ``scale * codes / 255``."""
    return codes.to(tl.float32) * (scale * 0.00392156862745098)[:, None]


@triton.jit
def encode_second_moment(root):
    """Codes ``round(255 * root / scale)``, at least 1 where the root is not 0, and the scales."""
    scale = group_scale(tl.max(bits_of(root), axis=1))
    codes = root * tl.div_rn(1.0, scale)[:, None] * 255.0
    codes = tl.where(root > 0.0, tl.maximum(tl.minimum(codes, 255.0), 1.0), 0.0)
    return bits_of(codes + ROUNDING_SHIFT).to(tl.uint8), scale


@triton.jit
def hypot(a, b):
    """``sqrt(a^2 + b^2)`` whose squares neither over- nor underflow: they are taken of ``a`` and ``b`` over a power of 2."""
    exponent = bits_of(tl.maximum(tl.abs(a), tl.abs(b))) & INF_BITS
    exponent = tl.minimum(tl.maximum(exponent, SMALLEST_BITS), 0x7E800000)
    inverse = value_of(0x7F000000 - exponent)
    a *= inverse
    b *= inverse
    return tl.sqrt(tl.fma(a, a, b * b)) * value_of(exponent)


@triton.jit
def saturating_square(root):
    """``root^2``, for every finite root finite."""
    square = root * root
    return tl.where(root <= LARGEST, tl.minimum(square, LARGEST), square)
