"""One Adam or AdamW step: the kernels of ``ops/adam.py``."""

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from hf_flashoptim.kernels.coefficients import (
    BLOCK,
    count_step,
    load_coefficient,
    load_learning_rate,
    power,
    store_coefficient,
)
from hf_flashoptim.kernels.companding import LARGEST, decode_second_moment, hypot, power_of_two, second_moment_dither
from hf_flashoptim.kernels.storage import (
    first_moment,
    load_moment,
    load_weight,
    master_weight,
    store_first_moment,
    store_second_moment,
    store_weight,
    widen,
)
from hf_flashoptim.kernels.table import (
    ERRORS,
    FIRST,
    FIRST_SCALE,
    GRAD,
    PARAM,
    SECOND,
    SECOND_SCALE,
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

# fp32's smallest normal number; ops/adam.py bounds the denominator the same way.
SMALLEST = 1.1754943508222875e-38
NEGATIVE_RATE, DECAY, ROOT_CORRECTION, INVERSE_BOUND, DITHER = (tl.constexpr(index) for index in range(5))


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """See ``ops/adam.py``."""
    kinds = Tensors(params, grads, exp_avgs, steps, error_bits, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales)
    preparation = Preparation(
        _prepare, (beta1, beta2, beta1**2 / beta2 if beta2 else math.inf, weight_decay if decoupled else 0.0)
    )
    coupled = weight_decay if not decoupled else 0.0
    hyper = (beta1, 1 - beta1, math.sqrt(beta2), math.sqrt(1 - beta2), max(eps, SMALLEST), coupled)
    error_dtype = error_bits[0].dtype if error_bits else None
    constants = (params[0].dtype, error_dtype, bool(exp_avg_scales), coupled != 0.0, maximize)
    # Without the limit, a step of compressed state takes 12% longer.
    max_registers = 80 if exp_avg_scales else None
    run_step(kinds, lr, preparation, Step(_step, hyper, constants, max_registers))


@triton.jit(do_not_specialize=["tensors", "coefficients", "first", "lr_address", "values"])
def _prepare(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    first: tl.int32,
    lr: tl.float64,
    lr_address: tl.int64,
    beta1: tl.float64,
    beta2: tl.float64,
    ratio: tl.float64,
    weight_decay: tl.float64,
    values,
    LR_DTYPE: tl.constexpr,
    LAST: tl.constexpr,
):
    write_table(table, first, values)
    if LAST:
        tl.debug_barrier()
        rate = load_learning_rate(lr, lr_address, LR_DTYPE)
        for first_tensor in range(0, tensors, BLOCK):
            tensor = first_tensor + tl.arange(0, BLOCK)
            step = count_step(table, tensors, tensor)
            mean_correction = 1.0 / (1.0 - power(beta1, step))
            square_correction = 1.0 - power(beta2, step)
            # ops/adam.py: largest_update
            terms = (1.0 - power(ratio, step)) / (1.0 - ratio)
            bound = (1.0 - beta1) * tl.sqrt(square_correction / (1.0 - beta2) * terms)
            # The mean's correction is left to the rate, and the bound is one of the uncorrected update.
            store_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE, -rate * mean_correction)
            store_coefficient(table, tensors, coefficients, tensor, DECAY, 1.0 - rate * weight_decay)
            store_coefficient(table, tensors, coefficients, tensor, ROOT_CORRECTION, 1.0 / tl.sqrt(square_correction))
            store_coefficient(table, tensors, coefficients, tensor, DITHER, second_moment_dither(step))
            store_coefficient(
                table, tensors, coefficients, tensor, INVERSE_BOUND, tl.where(ratio < 1.0, 1.0 / bound, 0.0)
            )


@triton.jit(do_not_specialize=["tensors", "coefficients"])
def _step(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    beta1: tl.float32,
    gradient_share: tl.float32,
    root_beta2: tl.float32,
    root_gradient_share: tl.float32,
    eps: tl.float32,
    coupled_decay: tl.float32,
    DTYPE: tl.constexpr,
    ERROR: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COUPLED: tl.constexpr,
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
    squares = base(table, tensors, tensor, SECOND, tl.uint8 if QUANTIZED else tl.float32, LAYOUT)
    square_scales = base(table, tensors, tensor, SECOND_SCALE, tl.bfloat16, LAYOUT)
    negative_rate = load_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE)
    decay = load_coefficient(table, tensors, coefficients, tensor, DECAY)
    inverse_bound = load_coefficient(table, tensors, coefficients, tensor, INVERSE_BOUND)
    root_correction = load_coefficient(table, tensors, coefficients, tensor, ROOT_CORRECTION)
    dither = load_coefficient(table, tensors, coefficients, tensor, DITHER)
    for tile in range(first_tile, end):
        offset, mask, group, group_mask = offsets(table, tensors, tensor, groups, tile, TILE_GROUPS, LAYOUT)
        stored, error = load_weight(params + offset, errors + offset, mask, ERROR, LAYOUT)
        grad = load(grads + offset, mask, LAYOUT)
        mean, mean_scale = load_moment(means + offset, mean_scales + group, mask, group_mask, QUANTIZED, LAYOUT)
        square, square_scale = load_moment(
            squares + offset, square_scales + group, mask, group_mask, QUANTIZED, LAYOUT
        )

        master = master_weight(stored, error, DTYPE, ERROR)
        grad = widen(grad, GRAD_DTYPE)
        if MAXIMIZE:
            grad = -grad
        if COUPLED:
            grad = tl.fma(master, coupled_decay, grad)
        mean = tl.fma(grad, gradient_share, first_moment(mean, mean_scale, beta1, QUANTIZED))
        root, unit = updated_root(square, square_scale, root_beta2, grad, root_gradient_share, QUANTIZED)
        if negative_rate != 0.0:
            correction = tl.minimum(unit * root_correction, LARGEST)
            denominator = tl.fma(root, correction[:, None], eps)
            # Bounds the update: mean / denominator.
            denominator = tl.maximum(denominator, tl.abs(mean) * inverse_bound, propagate_nan=tl.PropagateNan.ALL)
            # One instruction and a square in place of a division's eight; eps keeps the denominator normal.
            reciprocal_root = tl.rsqrt(denominator)
            update = mean * (reciprocal_root * reciprocal_root)
            master = tl.fma(update, negative_rate, master * decay)
            store_weight(params + offset, errors + offset, mask, master, DTYPE, ERROR)
        store_first_moment(means + offset, mean_scales + group, mask, group_mask, mean, QUANTIZED)
        at = squares + offset
        store_second_moment(at, square_scales + group, mask, group_mask, root, unit, dither, QUANTIZED)


@triton.jit
def updated_root(stored, scale, root_beta2, grad, root_gradient_share, QUANTIZED: tl.constexpr):
    """Root of the updated second moment and its unit, a power of 2 for each group.

    ``hypot(root_beta2 * root, root_gradient_share * grad)``: with the unit near the largest operand of the group, no
    square matters that underflows and none overflows.
    """
    largest = tl.max(tl.abs(grad), axis=1) * root_gradient_share
    if QUANTIZED:
        unit, inverse = power_of_two(tl.maximum(largest, scale))
        root = decode_second_moment(stored, scale * root_beta2 * inverse)
    else:
        root = tl.sqrt_rn(stored)
        unit, inverse = power_of_two(tl.maximum(largest, tl.max(root, axis=1)))
        root = root * root_beta2 * inverse[:, None]
    return hypot(root, grad * (root_gradient_share * inverse)[:, None]), unit
