"""One SGD step: the kernels of ``ops/sgd.py``."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from hf_flashoptim.kernels.coefficients import (
    BLOCK,
    count_step,
    load_coefficient,
    load_learning_rate,
    store_coefficient,
)
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

NEGATIVE_RATE, DECAY, GRADIENT_SHARE = (tl.constexpr(index) for index in range(3))


def sgd_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    momentum_buffer_scales: Sequence[Tensor],
    error_bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    decoupled: bool,
    maximize: bool,
) -> None:
    """See ``ops/sgd.py``."""
    kinds = Tensors(params, grads, momentum_buffers, steps, error_bits, momentum_buffer_scales)
    coupled = weight_decay if not decoupled else 0.0
    error_dtype = error_bits[0].dtype if error_bits else None
    quantized = bool(momentum_buffer_scales)
    constants = (params[0].dtype, error_dtype, quantized, bool(momentum_buffers), nesterov, coupled != 0.0, maximize)
    preparation = Preparation(_prepare, (1 - dampening, weight_decay if decoupled else 0.0), (bool(steps),))
    run_step(kinds, lr, preparation, Step(_step, (momentum, coupled), constants))


@triton.jit(do_not_specialize=["tensors", "coefficients", "first", "lr_address", "values"])
def _prepare(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    first: tl.int32,
    lr: tl.float64,
    lr_address: tl.int64,
    undampened: tl.float64,
    weight_decay: tl.float64,
    values,
    COUNTED: tl.constexpr,
    LR_DTYPE: tl.constexpr,
    LAST: tl.constexpr,
):
    write_table(table, first, values)
    if LAST:
        tl.debug_barrier()
        rate = load_learning_rate(lr, lr_address, LR_DTYPE)
        for first_tensor in range(0, tensors, BLOCK):
            tensor = first_tensor + tl.arange(0, BLOCK)
            store_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE, -rate)
            store_coefficient(table, tensors, coefficients, tensor, DECAY, 1.0 - rate * weight_decay)
            if COUNTED:
                share = tl.where(count_step(table, tensors, tensor) > 1.0, undampened, 1.0)
                store_coefficient(table, tensors, coefficients, tensor, GRADIENT_SHARE, share)


@triton.jit(do_not_specialize=["tensors", "coefficients"])
def _step(
    table,
    tensors: tl.int32,
    coefficients: tl.int32,
    momentum: tl.float32,
    coupled_decay: tl.float32,
    DTYPE: tl.constexpr,
    ERROR: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
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
    buffers = base(table, tensors, tensor, FIRST, tl.int8 if QUANTIZED else tl.float32, LAYOUT)
    buffer_scales = base(table, tensors, tensor, FIRST_SCALE, tl.bfloat16, LAYOUT)
    negative_rate = load_coefficient(table, tensors, coefficients, tensor, NEGATIVE_RATE)
    decay = load_coefficient(table, tensors, coefficients, tensor, DECAY)
    gradient_share = load_coefficient(table, tensors, coefficients, tensor, GRADIENT_SHARE)
    for tile in range(first_tile, end):
        offset, mask, group, group_mask = offsets(table, tensors, tensor, groups, tile, TILE_GROUPS, LAYOUT)
        stored, error = load_weight(params + offset, errors + offset, mask, ERROR, LAYOUT)
        grad = load(grads + offset, mask, LAYOUT)
        if MOMENTUM:
            at, scales_at = buffers + offset, buffer_scales + group
            buffer, buffer_scale = load_moment(at, scales_at, mask, group_mask, QUANTIZED, LAYOUT)

        master = master_weight(stored, error, DTYPE, ERROR)
        grad = widen(grad, GRAD_DTYPE)
        if MAXIMIZE:
            grad = -grad
        if COUPLED:
            grad = tl.fma(master, coupled_decay, grad)
        update = grad
        if MOMENTUM:
            update = tl.fma(grad, gradient_share, first_moment(buffer, buffer_scale, momentum, QUANTIZED))
            store_first_moment(at, scales_at, mask, group_mask, update, QUANTIZED)
            if NESTEROV:
                update = tl.fma(update, momentum, grad)
        if negative_rate != 0.0:
            master = tl.fma(update, negative_rate, master * decay)
            store_weight(params + offset, errors + offset, mask, master, DTYPE, ERROR)
