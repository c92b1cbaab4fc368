"""Triton kernels of the Cayley-Neumann transform: packed skew entries in, blocks out; block gradients in, packed out.

Q is unpacked once; products take operands in the dtype of the blocks (three TF32 products for fp32) and accumulate in
fp32. The transform iterates ``W <- 2Q + Q W`` three times from ``W = Q``, whose last value is the polynomial without its
identity; where Q fits in shared memory that is one launch. With the skew part ``K = H - H^T`` and the symmetric part
``Y = H + H^T`` of the gradient H of the blocks, the gradient of the entries is what stands above the diagonal of

    2K + Q Z + Z^T Q,    Z = 2N + N^T - 2Y - (Q R - R^T Q),    N = Q K,    R = Q Y.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Plan, aligned, ceil_divide, is_hopper, next_power_of_two

# Bytes of Q that a program keeps in shared memory; Hopper's holds 128 KiB and the rest of the program's tiles.
_RESIDENT_BYTES_HOPPER, _RESIDENT_BYTES = 128 * 1024, 32 * 1024


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
def _unpack_kernel(first_entries, second_entries, skew, num_first, block, TILE: tl.constexpr):
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    tile = _load_upper(entries, rows, columns, block) - _load_upper(entries, columns, rows, block)
    _store(skew + index.to(tl.int64) * block * block, rows, columns, tile, block)


@triton.jit
def _resident_kernel(skew, out, block, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """All three steps for some columns of a block, with Q in shared memory."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    q = _load(skew + start, rows, inner, block)
    w = _load(skew + start, rows, columns, block)
    twice = 2 * w.to(tl.float32)
    for _ in range(2):
        w = tl.dot(q, w, twice, input_precision=PRECISION).to(q.dtype)
    tile = tl.dot(q, w, twice, input_precision=PRECISION) + (rows == columns).to(tl.float32)
    _store(out + start, rows, columns, tile, block)


@triton.jit
def _step_kernel(
    skew, previous, out, block,
    LAST: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One step for a tile; the last one adds the identity."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = 2 * _load(skew + start, rows, columns, block).to(tl.float32)
    for inner in range(0, block, INNER):
        q = _load(skew + start, rows, inner + tl.arange(0, INNER)[None, :], block)
        w = _load(previous + start, inner + tl.arange(0, INNER)[:, None], columns, block)
        tile = tl.dot(q, w, tile, input_precision=PRECISION)
    if LAST:
        tile += (rows == columns).to(tl.float32)
    _store(out + start, rows, columns, tile, block)


@triton.jit
def _parts_kernel(gradient, k, y, block, TILE: tl.constexpr):
    """A tile of the skew part K and of the symmetric part Y of the block gradient."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    h = _load(gradient + start, rows, columns, block).to(tl.float32)
    h_transposed = _load(gradient + start, columns, rows, block).to(tl.float32)
    _store(k + start, rows, columns, h - h_transposed, block)
    _store(y + start, rows, columns, h + h_transposed, block)


@triton.jit
def _first_products_kernel(
    skew, k, y, n, r, block,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``N = Q K`` and of ``R = Q Y``."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    n_tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    r_tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    for inner in range(0, block, INNER):
        inner_rows = inner + tl.arange(0, INNER)[:, None]
        q = _load(skew + start, rows, inner + tl.arange(0, INNER)[None, :], block)
        n_tile = tl.dot(q, _load(k + start, inner_rows, columns, block), n_tile, input_precision=PRECISION)
        r_tile = tl.dot(q, _load(y + start, inner_rows, columns, block), r_tile, input_precision=PRECISION)
    _store(n + start, rows, columns, n_tile, block)
    _store(r + start, rows, columns, r_tile, block)


@triton.jit
def _symmetrized_product(
    tile, skew, z, rows, columns, block, PRECISION: tl.constexpr, INNER: tl.constexpr, SIGN: tl.constexpr
):
    """The tile plus that of ``Q z + SIGN z^T Q``."""
    for inner in range(0, block, INNER):
        inner_rows, inner_columns = inner + tl.arange(0, INNER)[:, None], inner + tl.arange(0, INNER)[None, :]
        q = _load(skew, rows, inner_columns, block)
        tile = tl.dot(q, _load(z, inner_rows, columns, block), tile, input_precision=PRECISION)
        z_transposed = _load(z, inner_columns, rows, block)
        # Q is skew: loading it transposed changes its sign.
        if SIGN == 1:
            q = _load(skew, inner_rows, columns, block)
        else:
            q = _load(skew, columns, inner_rows, block)
        tile = tl.dot(z_transposed, q, tile, input_precision=PRECISION)
    return tile


@triton.jit
def _second_products_kernel(
    skew, y, n, r, z, block,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``Z = 2N + N^T - 2Y - (Q R - R^T Q)``."""
    start = tl.program_id(0).to(tl.int64) * block * block
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    product = _symmetrized_product(product, skew + start, r + start, rows, columns, block, PRECISION, INNER, -1)
    tile = _load(n + start, columns, rows, block).to(tl.float32) - product
    tile += 2 * _load(n + start, rows, columns, block).to(tl.float32)
    tile -= 2 * _load(y + start, rows, columns, block).to(tl.float32)
    _store(z + start, rows, columns, tile, block)


@triton.jit
def _packed_gradient_kernel(
    skew, z, gradient, first_out, second_out,
    num_first, block,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """What stands above the diagonal in a tile of ``2K + Q Z + Z^T Q``."""
    index = tl.program_id(0)
    if tl.program_id(1) * ROWS >= (tl.program_id(2) + 1) * COLUMNS:
        return
    start = index.to(tl.int64) * block * block
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    h = _load(gradient + start, rows, columns, block).to(tl.float32)
    tile = 2 * (h - _load(gradient + start, columns, rows, block).to(tl.float32))
    tile = _symmetrized_product(tile, skew + start, z + start, rows, columns, block, PRECISION, INNER, 1)
    out = _select(first_out, second_out, num_first, index, block * (block - 1) // 2)
    out += (rows * (2 * block - rows - 1) // 2 - rows - 1) + columns
    tl.store(out, tile.to(out.dtype.element_ty), mask=(rows < columns) & (columns < block))


class Transform:
    """The transform and its gradient for one or two rotations with equal blocks, for given shapes and types on a GPU.

    Args:
        counts: numbers of blocks of each rotation; the blocks of the second follow those of the first.
        block: size of the blocks.
        entries_dtype: of the packed entries.
        dtype: of the blocks and of the operands of products.
        device: that all is on.

    Raises:
        TypeError: if the blocks' dtype is not one that the kernels compute in.
    """

    def __init__(
        self, counts: tuple[int, ...], block: int, entries_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"the GPU kernels give blocks in bf16, fp16 or fp32, not {dtype}: cast the activations")
        self.counts, self.shape = list(counts), (sum(counts), block, block)
        self.dtype, self.device = dtype, device
        total, (num_first, *_) = sum(counts), counts
        tile = min(64, next_power_of_two(block, 16))
        squares = (total, ceil_divide(block, tile), ceil_divide(block, tile))
        self._unpack = Plan(_unpack_kernel, squares, (num_first, block), (tile,), num_warps=4)
        self._parts = Plan(_parts_kernel, squares, (block,), (tile,), num_warps=4)
        size = next_power_of_two(block, 16)
        resident_bytes = _RESIDENT_BYTES_HOPPER if is_hopper(device) else _RESIDENT_BYTES
        self._resident = None
        if size * size * dtype.itemsize <= resident_bytes:
            columns = min(size, 64)
            grid = (total, ceil_divide(block, columns), 1)
            num_warps = max(1, min(8, size * columns // 1024))
            self._resident = Plan(_resident_kernel, grid, (block,), (size, columns, _precision(dtype)), num_warps)
        constants, grid, options = _tiles(total, block, dtype, device)
        self._step = Plan(_step_kernel, grid, (block,), (False, *constants), **options)
        self._last_step = Plan(_step_kernel, grid, (block,), (True, *constants), **options)
        self._first = Plan(_first_products_kernel, grid, (block,), constants, **options)
        self._second = Plan(_second_products_kernel, grid, (block,), constants, **options)
        self._packed = Plan(_packed_gradient_kernel, grid, (num_first, block), constants, **options)

    def unpack(self, *entries: Tensor) -> Tensor:
        """Dense matrices Q ``[num_blocks, block, block]`` from the packed entries of each rotation."""
        skew = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._unpack(aligned(entries[0]), aligned(entries[-1]), skew)
        return skew

    def blocks(self, skew: Tensor) -> Tensor:
        """``I + 2Q + 2Q^2 + 2Q^3 + Q^4``."""
        out = torch.empty_like(skew)
        if self._resident is not None:
            self._resident(skew, out)
        else:
            first, second = torch.empty_like(skew), torch.empty_like(skew)
            self._step(skew, skew, first)
            self._step(skew, first, second)
            self._last_step(skew, second, out)
        return out

    def gradient(self, skew: Tensor, gradient: Tensor, entries: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the packed entries, in their shapes and dtypes, from that of the blocks."""
        outs = [torch.empty_like(each) for each in entries]
        k, y, n, r, z = torch.empty((5, *self.shape), dtype=self.dtype, device=self.device).unbind()
        gradient = aligned(gradient)
        self._parts(gradient, k, y)
        self._first(skew, k, y, n, r)
        self._second(skew, y, n, r, z)
        self._packed(skew, z, gradient, outs[0], outs[-1])
        return outs


@lru_cache(4096)
def transform_of(
    counts: tuple[int, ...],
    block: int,
    entries_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    gradient_dtype: torch.dtype = torch.float32,
) -> Transform:
    """The `Transform` for these shapes and types; one each, since it remembers compiled kernels."""
    return Transform(counts, block, entries_dtype, dtype, device)


def cayley_neumann(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """The operation `poetx::cayley_neumann` for blocks in bf16, fp16 and fp32; arguments and result as there."""
    transform = transform_of((entries.shape[0],), block_size(entries), entries.dtype, dtype, entries.device)
    return transform.blocks(transform.unpack(entries))


def cayley_neumann_backward(gradient: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    """The operation `poetx::cayley_neumann_backward`; arguments and result as there."""
    block = block_size(entries)
    transform = transform_of((entries.shape[0],), block, entries.dtype, dtype, entries.device, gradient.dtype)
    return transform.gradient(transform.unpack(entries), gradient, [aligned(entries)])[0]


def block_size(entries: Tensor) -> int:
    """Size of the matrices with these packed entries."""
    return (1 + isqrt(1 + 8 * entries.shape[1])) // 2


def _tiles(
    num_blocks: int, block: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple, tuple[int, int, int], dict[str, int]]:
    """Constants, grid and options of the kernels that multiply tile by tile."""
    size = next_power_of_two(block, 16)
    tuned = is_hopper(device) and dtype.itemsize == 2
    rows, columns, inner = (min(size, 128), min(size, 64), min(size, 32)) if tuned else [min(size, 64)] * 2 + [32]
    inner = min(size, inner)
    grid = (num_blocks, ceil_divide(block, rows), ceil_divide(block, columns))
    options = {"num_warps": max(1, min(4, rows * columns // 1024)), "num_stages": 3 if tuned else 2}
    return (_precision(dtype), rows, columns, inner), grid, options


def _precision(dtype: torch.dtype) -> str:
    """Three TF32 products have the accuracy of fp32; 16-bit operands ignore it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
