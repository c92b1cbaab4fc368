"""Device functions for companded 8-bit moments: the formulas of ``ops/companding.py`` on tiles ``[groups, 32]``.

A scale is loaded and stored as the bit pattern of its bf16 (int16) and handled as the fp32 value of it.
"""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST = tl.constexpr(1.1754943508222875e-38)
SMALLEST_BITS = tl.constexpr(0x00800000)
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
# Adding it leaves a number below 2^22 rounded to nearest, ties to even, in the low bits of the sum.
ROUNDING_SHIFT = tl.constexpr(12582912.0)
DITHER_STRIDE = tl.constexpr(2654435769)
DITHER_UNIT = tl.constexpr(2.0**-25)


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
def group_scale(largest):
    """Scales of groups with these largest magnitudes: rounded to bf16, in its normal range, NaN where not finite."""
    bits = bits_of(tl.minimum(tl.maximum(largest, SMALLEST), LARGEST_BF16))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return value_of(tl.where(largest <= LARGEST, rounded, NAN_BITS))


@triton.jit
def group_scale_rounded_up(largest):
    """The same, but rounded up, except for what lies above a bf16 number by 256 ULPs or less."""
    bits = bits_of(tl.minimum(tl.maximum(largest, SMALLEST), LARGEST_BF16))
    return value_of(tl.where(largest <= LARGEST, (bits + (0x10000 - 256 - 1)) & -0x10000, NAN_BITS))


@triton.jit
def reciprocal(values):
    """``1 / values`` of normal numbers, correctly rounded but for rare cases, in half of a division's instructions."""
    root = tl.rsqrt(values)
    approximate = root * root
    return tl.fma(tl.fma(values, -approximate, 1.0), approximate, approximate)


@triton.jit
def divide(numerator, negative_denominator):
    """``numerator / -negative_denominator``, for denominators between 1 and 254 that are no smaller than the numerator.

    Correctly rounded for everything that codes are made of and decoded to (a test on the GPU tries it all), in 5
    instructions; Triton's division takes 8.
    """
    approximate = tl.rsqrt(negative_denominator * negative_denominator)
    quotient = numerator * approximate
    return tl.fma(tl.fma(negative_denominator, quotient, numerator), approximate, quotient)


@triton.jit
def decode_first_moment(codes, scale):
    """``scale * z / (2 - |z|)`` with ``z = codes / 127``."""
    z = codes.to(tl.float32)
    return divide(z, tl.abs(z) - 254.0) * scale[:, None]


@triton.jit
def encode_first_moment(values):
    """Codes ``round(127 * 2x / (1 + |x|))`` with ``x = values / scale``, and the scales."""
    scale = group_scale(tl.reduce(tl.abs(values), 1, _larger))
    x = values * reciprocal(scale)[:, None]
    codes = divide(x, -1.0 - tl.abs(x)) * 254.0
    return bits_of(codes + ROUNDING_SHIFT).to(tl.int8), scale


@triton.jit
def decode_second_moment(codes, scale):
    """The root ``scale * codes / 255``."""
    return codes.to(tl.float32) * (scale * 0.00392156862745098)[:, None]


@triton.jit
def second_moment_dither(step):
    """What is added to the second moment's codes before they are rounded in a step, given in fp32."""
    high = (step.to(tl.int32).to(tl.uint32) * DITHER_STRIDE) >> 8
    return (2 * high.to(tl.int32) + (1 - 0x1000000)).to(tl.float32) * DITHER_UNIT


@triton.jit
def encode_second_moment(root, unit, dither):
    """Codes ``round(255 * root / scale + dither)``, at least 1 where the root is not 0, and the scales.

    ``root`` is given in units ``[groups]``, powers of 2 near the groups' largest roots.
    """
    scale = group_scale_rounded_up(tl.reduce(root, 1, _larger) * unit)
    codes = tl.fma(root, (reciprocal(scale) * unit * 255.0)[:, None], dither)
    codes = tl.minimum(tl.maximum(codes, tl.where(root > 0.0, 1.0, 0.0)), 255.0)
    return bits_of(codes + ROUNDING_SHIFT).to(tl.uint8), scale


@triton.jit
def power_of_two(magnitude):
    """The power of 2 below normal magnitudes, or near enough for the others, and its inverse."""
    exponent = tl.minimum(tl.maximum(bits_of(magnitude) & INF_BITS, SMALLEST_BITS), 0x7E800000)
    return value_of(exponent), value_of(0x7F000000 - exponent)


@triton.jit
def hypot(a, b):
    """``sqrt(a^2 + b^2)``, at least ``|b|`` however small its square, and NaN if either is."""
    return tl.maximum(tl.sqrt(tl.fma(a, a, b * b)), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def saturating_square(root):
    """``root^2``, for every finite root finite."""
    square = root * root
    return tl.where(root <= LARGEST, tl.minimum(square, LARGEST), square)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
