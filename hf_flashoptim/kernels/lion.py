"""One Lion step: the kernels of ``ops/lion.py``."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from hf_flashoptim.kernels.coefficients import BLOCK, load_coefficient, load_learning_rate, store_coefficient
from hf_flashoptim.kernels.storage import (
    first_moment,
    load_moment,
    load_weight,
    master_weight,
    store_first_moment,
    store_weight,
    widen,
)
from hf_flashoptim.kernels.table import (
    ERRORS,
    FIRST,
    FIRST_SCALE,
    GRAD,
    PARAM,
    Preparation,
    Step,
    Tensors,
    base,
    find_work,
    load,
    offsets,
    run_step,
    write_table,
)

NEGATIVE_RATE, DECAY = (tl.constexpr(index) for index in range(2))


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """See ``ops/lion.py``."""
    kinds = Tensors(params, grads, exp_avgs, errors=error_bits, first_scales=exp_avg_scales)
    error_dtype = error_bits[0].dtype if error_bits else None
    constants = (params[0].dtype, error_dtype, bool(exp_avg_scales), maximize)
    step = Step(_step, (beta1, 1 - beta1, beta2, 1 - beta2), constants)
    run_step(kinds, lr, Preparation(_prepare, (weight_decay,)), step)


@triton.jit(do_not_specialize=["tensors", "coefficients", "first", "lr_address", "values"])
def _prepare(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    first: tl.int32,
    lr: tl.float64,
    lr_address: tl.int64,
    weight_decay: tl.float64,
    values,
    LR_DTYPE: tl.constexpr,
    LAST: tl.constexpr,
):
    write_table(table, first, values)
    if LAST:
        rate = load_learning_rate(lr, lr_address, LR_DTYPE)
        for first_tensor in range(0, tensors, BLOCK):
            tensor = first_tensor + tl.arange(0, BLOCK)
            store_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE, -rate)
            store_coefficient(table, tensors, coefficients, tensor, DECAY, 1.0 - rate * weight_decay)


@triton.jit(do_not_specialize=["tensors", "coefficients"])
def _step(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    beta1: tl.float32,
    gradient_share: tl.float32,
    beta2: tl.float32,
    moment_share: tl.float32,
    DTYPE: tl.constexpr,
    ERROR: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILES: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    tensor, groups, first_tile, end = find_work(table, tensors, TILES, TILE_GROUPS)
    params = base(table, tensors, tensor, PARAM, DTYPE, LAYOUT)
    errors = base(table, tensors, tensor, ERRORS, tl.int8 if ERROR is None else ERROR, LAYOUT)
    grads = base(table, tensors, tensor, GRAD, GRAD_DTYPE, LAYOUT)
    means = base(table, tensors, tensor, FIRST, tl.int8 if QUANTIZED else tl.float32, LAYOUT)
    mean_scales = base(table, tensors, tensor, FIRST_SCALE, tl.bfloat16, LAYOUT)
    negative_rate = load_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE)
    decay = load_coefficient(table, tensors, coefficients, tensor, DECAY)
    for tile in range(first_tile, end):
        offset, mask, group, group_mask = offsets(table, tensors, tensor, groups, tile, TILE_GROUPS, LAYOUT)
        stored, error = load_weight(params + offset, errors + offset, mask, ERROR, LAYOUT)
        grad = load(grads + offset, mask, LAYOUT)
        mean, mean_scale = load_moment(means + offset, mean_scales + group, mask, group_mask, QUANTIZED, LAYOUT)

        grad = widen(grad, GRAD_DTYPE)
        if MAXIMIZE:
            grad = -grad
        mean = first_moment(mean, mean_scale, 1.0, QUANTIZED)
        if negative_rate != 0.0:
            update = tl.fma(grad, gradient_share, mean * beta1)
            # Not the sign alone: it would hide inf and NaN.
            sign = (update - update) + tl.where(update > 0.0, 1.0, tl.where(update < 0.0, -1.0, 0.0))
            master = tl.fma(sign, negative_rate, master_weight(stored, error, DTYPE, ERROR) * decay)
            store_weight(params + offset, errors + offset, mask, master, DTYPE, ERROR)
        mean = tl.fma(grad, moment_share, mean * beta2)
        store_first_moment(means + offset, mean_scales + group, mask, group_mask, mean, QUANTIZED)
