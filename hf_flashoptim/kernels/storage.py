"""Device functions that load and store parameters and moments as fp32 tiles, whatever they are stored as.

``at`` are pointers (``kernels/table.py``), ``mask`` says which elements exist. All of a tile is loaded before anything
is computed from it, hence loading apart from decoding.
"""

import triton
import triton.language as tl

from hf_flashoptim.kernels.companding import (
    bf16_bits,
    bits_of,
    decode_first_moment,
    encode_first_moment,
    encode_second_moment,
    saturating_square,
    value_of,
)
from hf_flashoptim.kernels.error_correction import join_bf16, join_fp16, split_bf16, split_fp16
from hf_flashoptim.kernels.table import load


@triton.jit
def widen(stored, DTYPE: tl.constexpr):
    """fp32 of stored values; those of bf16 are bit patterns."""
    if DTYPE == tl.bfloat16:
        return value_of(stored.to(tl.int32) << 16)
    else:
        return stored.to(tl.float32)


@triton.jit
def load_weight(params_at, errors_at, mask, ERROR: tl.constexpr, LAYOUT: tl.constexpr):
    """Stored parameters and their error bits, if there are any."""
    stored = load(params_at, mask, LAYOUT)
    if ERROR is None:
        return stored, stored
    else:
        return stored, load(errors_at, mask, LAYOUT)


@triton.jit
def master_weight(stored, errors, DTYPE: tl.constexpr, ERROR: tl.constexpr):
    """Master weights of what ``load_weight`` loaded."""
    if ERROR is None:
        return widen(stored, DTYPE)
    elif DTYPE == tl.bfloat16:
        return join_bf16(stored, errors)
    else:
        return join_fp16(stored, errors)


@triton.jit
def store_weight(params_at, errors_at, mask, master, DTYPE: tl.constexpr, ERROR: tl.constexpr):
    """Round master weights to the parameters, and what is lost to their error bits, if there are any."""
    if ERROR is not None:
        if DTYPE == tl.bfloat16:
            stored, errors = split_bf16(master, ERROR)
        else:
            stored, errors = split_fp16(master, ERROR)
        tl.store(errors_at, errors, mask=mask)
    elif DTYPE == tl.bfloat16:
        stored = bf16_bits(master)
    else:
        stored = master.to(DTYPE)
    tl.store(params_at, stored, mask=mask)


@triton.jit
def load_moment(at, scales_at, mask, group_mask, QUANTIZED: tl.constexpr, LAYOUT: tl.constexpr):
    """Stored moments and their groups' scales, if there are any."""
    stored = load(at, mask, LAYOUT)
    if QUANTIZED:
        return stored, widen(load(scales_at, group_mask, LAYOUT), tl.bfloat16)
    else:
        return stored, stored


@triton.jit
def first_moment(stored, scale, factor, QUANTIZED: tl.constexpr):
    """The first moment of what ``load_moment`` loaded, times a factor."""
    if QUANTIZED:
        return decode_first_moment(stored, scale * factor)
    else:
        return stored * factor


@triton.jit
def store_first_moment(at, scales_at, mask, group_mask, mean, QUANTIZED: tl.constexpr):
    """Store first moments."""
    if QUANTIZED:
        codes, scale = encode_first_moment(mean)
        tl.store(at, codes, mask=mask)
        tl.store(scales_at, (bits_of(scale) >> 16).to(tl.int16), mask=group_mask)
    else:
        tl.store(at, mean, mask=mask)


@triton.jit
def store_second_moment(at, scales_at, mask, group_mask, root, unit, dither, QUANTIZED: tl.constexpr):
    """Store second moments, given their roots in units ``[groups]``, powers of 2."""
    if QUANTIZED:
        codes, scale = encode_second_moment(root, unit, dither)
        tl.store(at, codes, mask=mask)
        tl.store(scales_at, (bits_of(scale) >> 16).to(tl.int16), mask=group_mask)
    else:
        tl.store(at, saturating_square(root * unit[:, None]), mask=mask)
