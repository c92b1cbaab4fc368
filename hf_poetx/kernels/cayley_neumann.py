"""Triton kernels of the Cayley-Neumann transform: packed skew entries in, blocks out; block gradients in, packed out.

Products take operands in the dtype of the blocks (three TF32 products for fp32) and accumulate in fp32. The transform
iterates ``W <- 2Q + Q W`` three times from ``W = Q``, whose last value is the polynomial without its identity. With the
skew part ``K = H - H^T`` and the symmetric part ``Y = H + H^T`` of the gradient H of the blocks, the gradient of the
entries is what stands above the diagonal of

    2K + Q Z + Z^T Q,    Z = A + B^T,    A = 2 Q K - 2 Y - Q Q Y,    B = Q K - Q Q Y.

Everything but the last line goes column by column. So where Q fits in Hopper's shared memory, the transform is one launch
after that which unpacks Q, and its gradient two more; elsewhere each product is one.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Plan, aligned, ceil_divide, is_hopper, next_power_of_two

# Bytes of Q that a program keeps in Hopper's shared memory, beside the rest of its tiles. Elsewhere Q is not kept: Triton
# 3.6 cannot compile the loop of `_columns_gradient_kernel` for older matrix units, nor for 16-bit tiles below 64.
_RESIDENT_BYTES = 128 * 1024


@triton.jit
def _load_upper(entries, rows, columns, block):
    """The tile of Q's upper triangle at the given rows and columns, 0 elsewhere."""
    offsets = (rows * (2 * block - rows - 1) // 2 - rows - 1) + columns
    return tl.load(entries + offsets, mask=(rows < columns) & (columns < block), other=0.0).to(tl.float32)


@triton.jit
def _load(matrix, rows, columns, block):
    """A tile of a block, 0 outside."""
    return tl.load(matrix + rows * block + columns, mask=(rows < block) & (columns < block), other=0.0)


@triton.jit
def _store(matrix, rows, columns, tile, block):
    tile = tile.to(matrix.dtype.element_ty)
    tl.store(matrix + rows * block + columns, tile, mask=(rows < block) & (columns < block))


@triton.jit
def _select(first, second, num_first, index, size):
    """Where the data of the block with this index begins: the blocks of `second` follow those of `first`."""
    if index < num_first:
        start = first + index.to(tl.int64) * size
    else:
        start = second + (index - num_first).to(tl.int64) * size
    return start


@triton.jit
def _transform_kernel(skew, out, block, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """All three steps for some columns of a block, with Q in shared memory."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    q = _load(skew + start, rows, inner, block)
    w = _load(skew + start, rows, columns, block)
    # One loop for all uses of Q, so that it is stored to shared memory once.
    for _ in range(3):
        twice = 2 * _load(skew + start, rows, columns, block).to(tl.float32)
        w = tl.dot(q, w, twice, input_precision=PRECISION).to(q.dtype)
    _store(out + start, rows, columns, w.to(tl.float32) + (rows == columns).to(tl.float32), block)


@triton.jit
def _columns_gradient_kernel(
    gradient, skew, a, b, block, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):
    """Some columns of A and B of a block, with Q in shared memory."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    q = _load(skew + start, rows, inner, block)
    h = _load(gradient + start, rows, columns, block)
    h_transposed = _load(gradient + start, columns, rows, block)
    operand, k = (h + h_transposed).to(q.dtype), (h - h_transposed).to(q.dtype)
    a_tile = -2 * operand.to(tl.float32)
    b_tile = tl.zeros((SIZE, COLUMNS), tl.float32)
    # One loop for all uses of Q, so that it is stored to shared memory once: Q Y, its product with -Q, then Q K.
    for step in range(3):
        product = tl.dot(q, operand, input_precision=PRECISION)
        if step == 0:
            operand = (-product).to(q.dtype)
        else:
            operand = k
            a_tile += step * product
            b_tile += product
    _store(a + start, rows, columns, a_tile, block)
    _store(b + start, rows, columns, b_tile, block)


@triton.jit
def _unpack_kernel(first_entries, second_entries, skew, num_first, block, TILE: tl.constexpr):
    """A tile on or above the diagonal of Q, and its mirror image below, which would take scattered loads."""
    index = tl.program_id(0)
    if tl.program_id(1) > tl.program_id(2):
        return
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    skew += index.to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    tile = _load_upper(entries, rows[:, None], columns[None, :], block)
    mirrored = -tl.trans(tile)
    if tl.program_id(1) == tl.program_id(2):
        _store(skew, rows[:, None], columns[None, :], tile + mirrored, block)
    else:
        _store(skew, rows[:, None], columns[None, :], tile, block)
        _store(skew, columns[:, None], rows[None, :], mirrored, block)


@triton.jit
def _product(tile, left, right, rows, columns, block, PRECISION: tl.constexpr, INNER: tl.constexpr):
    """The tile plus that of ``left @ right``."""
    for inner in range(0, block, INNER):
        left_tile = _load(left, rows, inner + tl.arange(0, INNER)[None, :], block)
        right_tile = _load(right, inner + tl.arange(0, INNER)[:, None], columns, block)
        tile = tl.dot(left_tile, right_tile, tile, input_precision=PRECISION)
    return tile


@triton.jit
def _step_kernel(
    skew, previous, out, block,
    LAST: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One step of the transform for a tile; the last one adds the identity."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    tile = 2 * _load(skew + start, rows, columns, block).to(tl.float32)
    tile = _product(tile, skew + start, previous + start, rows, columns, block, PRECISION, INNER)
    if LAST:
        tile += (rows == columns).to(tl.float32)
    _store(out + start, rows, columns, tile, block)


@triton.jit
def _parts_kernel(gradient, k, y, block, TILE: tl.constexpr):
    """A tile of the skew part K and of the symmetric part Y of the block gradient."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    h = _load(gradient + start, rows, columns, block)
    h_transposed = _load(gradient + start, columns, rows, block)
    _store(k + start, rows, columns, h - h_transposed, block)
    _store(y + start, rows, columns, h + h_transposed, block)


@triton.jit
def _first_products_kernel(
    skew, k, y, n, r, block,
    PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``N = Q K`` and of ``R = Q Y``."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    zeros = tl.zeros((TILE, TILE), tl.float32)
    tile = _product(zeros, skew + start, k + start, rows, columns, block, PRECISION, INNER)
    _store(n + start, rows, columns, tile, block)
    tile = _product(zeros, skew + start, y + start, rows, columns, block, PRECISION, INNER)
    _store(r + start, rows, columns, tile, block)


@triton.jit
def _second_products_kernel(
    skew, y, n, r, a, b, block,
    PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``A = 2N - 2Y - Q R`` and of ``B = N - Q R``."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    zeros = tl.zeros((TILE, TILE), tl.float32)
    product = _product(zeros, skew + start, r + start, rows, columns, block, PRECISION, INNER)
    n_tile = _load(n + start, rows, columns, block).to(tl.float32)
    y_tile = _load(y + start, rows, columns, block).to(tl.float32)
    _store(b + start, rows, columns, n_tile - product, block)
    _store(a + start, rows, columns, 2 * (n_tile - y_tile) - product, block)


@triton.jit
def _packed_gradient_kernel(
    gradient, skew, a, b, first_out, second_out, num_first, block,
    PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """What stands above the diagonal in a tile of ``2K + Q (A + B^T) + (A^T + B) Q``."""
    index = tl.program_id(0)
    if tl.program_id(1) > tl.program_id(2):
        return
    start = index.to(tl.int64) * block * block
    gradient, skew, a, b = gradient + start, skew + start, a + start, b + start
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    tile = tl.zeros((TILE, TILE), tl.float32)
    for inner_start in range(0, block, INNER):
        inner = inner_start + tl.arange(0, INNER)
        q = _load(skew, rows[:, None], inner[None, :], block)
        tile = tl.dot(q, _load(a, inner[:, None], columns[None, :], block), tile, input_precision=PRECISION)
        b_tile = _load(b, columns[:, None], inner[None, :], block)
        tile = tl.dot(q, tl.trans(b_tile), tile, input_precision=PRECISION)
        q = _load(skew, inner[:, None], columns[None, :], block)
        a_tile = _load(a, inner[:, None], rows[None, :], block)
        tile = tl.dot(tl.trans(a_tile), q, tile, input_precision=PRECISION)
        tile = tl.dot(_load(b, rows[:, None], inner[None, :], block), q, tile, input_precision=PRECISION)
    rows, columns = rows[:, None], columns[None, :]
    tile += 2 * (_load(gradient, rows, columns, block) - _load(gradient, columns, rows, block))
    out = _select(first_out, second_out, num_first, index, block * (block - 1) // 2)
    out += (rows * (2 * block - rows - 1) // 2 - rows - 1) + columns
    tl.store(out, tile.to(out.dtype.element_ty), mask=(rows < columns) & (columns < block))


class Transform:
    """The transform and its gradient for one or two rotations with equal blocks, for given shapes and types on a GPU.

    Args:
        counts: numbers of blocks of each rotation; the blocks of the second follow those of the first.
        block: size of the blocks.
        dtype: of the blocks and of the operands of products.
        device: that all is on.

    Raises:
        TypeError: if the blocks' dtype is not one that the kernels compute in.
    """

    def __init__(self, counts: tuple[int, ...], block: int, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"the GPU kernels give blocks in bf16, fp16 or fp32, not {dtype}: cast the activations")
        self.shape, self.dtype, self.device = (sum(counts), block, block), dtype, device
        total, num_first = sum(counts), counts[0]
        # Three TF32 products have the accuracy of fp32; 16-bit operands ignore it.
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
        size, hopper = next_power_of_two(block, 64 if dtype.itemsize == 2 else 16), is_hopper(device)
        tile = min(64, size)
        squares, squares_tile = (total, ceil_divide(block, tile), ceil_divide(block, tile)), (tile,)
        self._unpack = Plan(_unpack_kernel, squares, (num_first, block), squares_tile, num_warps=4)
        self._resident = hopper and size * size * dtype.itemsize <= _RESIDENT_BYTES
        if self._resident:
            grid, constants = (*squares[:2], 1), (size, tile, precision)
            num_warps = max(1, min(8, size * tile // 1024))
            self._transform = Plan(_transform_kernel, grid, (block,), constants, num_warps)
            self._columns = Plan(_columns_gradient_kernel, grid, (block,), constants, num_warps)
        constants, num_stages = (precision, tile, min(tile, 32)), 3 if hopper else 2
        num_warps = max(1, min(4, tile * tile // 1024))
        self._packed = Plan(_packed_gradient_kernel, squares, (num_first, block), constants, num_warps, num_stages)
        if not self._resident:
            tile = min(size, 128 if hopper and dtype.itemsize == 2 else 64)
            grid = (total, ceil_divide(block, tile), ceil_divide(block, tile))
            constants = (precision, tile, min(tile, 32))
            options = {"num_warps": max(1, min(8, tile * tile // 1024)), "num_stages": num_stages}
            self._parts = Plan(_parts_kernel, squares, (block,), squares_tile, num_warps=4)
            self._step = Plan(_step_kernel, grid, (block,), (False, *constants), **options)
            self._last_step = Plan(_step_kernel, grid, (block,), (True, *constants), **options)
            self._first = Plan(_first_products_kernel, grid, (block,), constants, **options)
            self._second = Plan(_second_products_kernel, grid, (block,), constants, **options)

    def _new(self, count: int) -> tuple[Tensor, ...]:
        return torch.empty((count, *self.shape), dtype=self.dtype, device=self.device).unbind()

    def unpack(self, *entries: Tensor) -> Tensor:
        """Dense matrices Q ``[num_blocks, block, block]`` from the packed entries of each rotation."""
        skew = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._unpack(aligned(entries[0]), aligned(entries[-1]), skew)
        return skew

    def blocks(self, skew: Tensor) -> Tensor:
        """``I + 2Q + 2Q^2 + 2Q^3 + Q^4``."""
        out = torch.empty_like(skew)
        if self._resident:
            self._transform(skew, out)
        else:
            first, second = self._new(2)
            self._step(skew, skew, first)
            self._step(skew, first, second)
            self._last_step(skew, second, out)
        return out

    def gradient(self, skew: Tensor, gradient: Tensor, entries: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the packed entries, in their shapes and dtypes, from that of the blocks, which is in fp32."""
        outs = [torch.empty_like(each) for each in entries]
        gradient = aligned(gradient)
        a, b = self._new(2)
        if self._resident:
            self._columns(gradient, skew, a, b)
        else:
            k, y, n, r = self._new(4)
            self._parts(gradient, k, y)
            self._first(skew, k, y, n, r)
            self._second(skew, y, n, r, a, b)
        self._packed(gradient, skew, a, b, outs[0], outs[-1])
        return outs


@lru_cache(4096)
def transform_of(
    counts: tuple[int, ...],
    block: int,
    entries_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> Transform:
    """The `Transform` for these shapes and types; one each, since it remembers compiled kernels."""
    return Transform(counts, block, dtype, device)


def cayley_neumann(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """The operation `poetx::cayley_neumann` for blocks in bf16, fp16 and fp32; arguments and result as there."""
    transform = transform_of((entries.shape[0],), block_size(entries), entries.dtype, dtype, entries.device)
    return transform.blocks(transform.unpack(entries))


def cayley_neumann_backward(gradient: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    """The operation `poetx::cayley_neumann_backward`; arguments and result as there."""
    transform = transform_of((entries.shape[0],), block_size(entries), entries.dtype, dtype, entries.device)
    return transform.gradient(transform.unpack(entries), gradient.float(), [aligned(entries)])[0]


def block_size(entries: Tensor) -> int:
    """Size of the matrices with these packed entries."""
    return (1 + isqrt(1 + 8 * entries.shape[1])) // 2
