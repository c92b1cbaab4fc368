"""Triton kernels of the Cayley-Neumann transform: packed skew entries in, blocks out; block gradients in, packed out.

Both read Q straight from its packed entries, for any block size, and several rotations share a launch. The transform
iterates ``W <- 2Q + Q W`` three times from ``W = Q``, whose last value is the polynomial without its identity; a block
that fits in shared memory does so in one launch. The gradient needs four products: with the skew part
``K = H - H^T`` and the symmetric part ``Y = H + H^T`` of the gradient H,

    N = Q K,    R = Q Y,    E = N - Y - Q R,    gradient = 2K + F - F^T  with  F = Q (E + E^T + N).
"""

from collections.abc import Sequence
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch

# Bytes of Q that one program keeps in shared memory, by compute capability; less room means passes through the cache.
_RESIDENT_BYTES = {9: 128 * 1024}
_SAFE_RESIDENT_BYTES = 32 * 1024


@triton.jit
def _load_upper(entries, rows, columns, block):
    """The tile of Q's upper triangle at the given rows and columns in fp32, 0 elsewhere."""
    offsets = (rows * (2 * block - rows - 1) // 2 - rows - 1) + columns
    return tl.load(entries + offsets, mask=(rows < columns) & (columns < block), other=0.0).to(tl.float32)


@triton.jit
def _load_skew(entries, rows, columns, block):
    """The tile of Q at the given rows and columns in fp32, 0 outside."""
    return _load_upper(entries, rows, columns, block) - _load_upper(entries, columns, rows, block)


@triton.jit
def _load(matrix, rows, columns, block):
    """A tile of a dense block in fp32, 0 outside."""
    return tl.load(matrix + rows * block + columns, mask=(rows < block) & (columns < block), other=0.0).to(tl.float32)


@triton.jit
def _select(first, second, num_first, index, size):
    """Where the data of the block with this index begins: the blocks of `second` follow those of `first`."""
    if index < num_first:
        start = first + index.to(tl.int64) * size
    else:
        start = second + (index - num_first).to(tl.int64) * size
    return start


@triton.jit
def _resident_kernel(
    first_entries, second_entries, first_out, second_out,
    num_first, block,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of a block of up to SIZE rows, with all of Q in shared memory."""
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    out = _select(first_out, second_out, num_first, index, block * block)
    rows, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    skew = _load_skew(entries, rows, inner, block).to(PRODUCT)
    tile = _load_skew(entries, rows, columns, block)
    twice = 2 * tile
    for _ in range(3):
        tile = tl.dot(skew, tile.to(PRODUCT), twice, input_precision=PRECISION)
    _store_block(out, rows, columns, tile, block)


@triton.jit
def _resident_halves_kernel(
    first_entries, second_entries, first_out, second_out,
    num_first, block,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for up to 2 SIZE rows, Q = [[A, B], [-B^T, C]]: B is unpacked once and read transposed for -B^T."""
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    out = _select(first_out, second_out, num_first, index, block * block)
    rows, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a = _load_skew(entries, rows, inner, block).to(PRODUCT)
    b = _load_upper(entries, rows, SIZE + inner, block).to(PRODUCT)
    c = _load_skew(entries, SIZE + rows, SIZE + inner, block).to(PRODUCT)
    top, bottom = _load_skew(entries, rows, columns, block), _load_skew(entries, SIZE + rows, columns, block)
    twice_top, twice_bottom = 2 * top, 2 * bottom
    for _ in range(3):
        right_top, right_bottom = top.to(PRODUCT), bottom.to(PRODUCT)
        top = tl.dot(b, right_bottom, twice_top, input_precision=PRECISION)
        top = tl.dot(a, right_top, top, input_precision=PRECISION)
        bottom = tl.dot(tl.trans(b), -right_top, twice_bottom, input_precision=PRECISION)
        bottom = tl.dot(c, right_bottom, bottom, input_precision=PRECISION)
    _store_block(out, rows, columns, top, block)
    _store_block(out, SIZE + rows, columns, bottom, block)


@triton.jit
def _store_block(out, rows, columns, tile, block):
    """Store a tile of a block, adding its part of the identity."""
    tile = (tile + (rows == columns).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + rows * block + columns, tile, mask=(rows < block) & (columns < block))


@triton.jit
def _step_kernel(
    first_entries, second_entries, previous, out,
    num_first, block,
    FIRST: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One step ``2Q + Q W`` for a tile; W is Q itself in the first step, and the last one adds the identity."""
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    start = index.to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    tile = 2 * _load_skew(entries, rows, columns, block)
    for inner in range(0, block, INNER):
        inner_rows, inner_columns = inner + tl.arange(0, INNER)[:, None], inner + tl.arange(0, INNER)[None, :]
        if FIRST:
            right = _load_skew(entries, inner_rows, columns, block)
        else:
            right = _load(previous + start, inner_rows, columns, block)
        tile = tl.dot(_load_skew(entries, rows, inner_columns, block), right, tile, input_precision=PRECISION)
    if LAST:
        tile += (rows == columns).to(tl.float32)
    out += start + rows * block + columns
    tl.store(out, tile.to(out.dtype.element_ty), mask=(rows < block) & (columns < block))


@triton.jit
def _first_products_kernel(
    first_entries, second_entries, first_gradient, second_gradient, n, r,
    num_first, block, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``N = Q K`` and of ``R = Q Y``."""
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    gradient = _select(first_gradient, second_gradient, num_first, index, block * block)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    n_tile = tl.zeros((TILE, TILE), tl.float32)
    r_tile = tl.zeros((TILE, TILE), tl.float32)
    for inner in range(0, block, INNER):
        inner_rows, inner_columns = inner + tl.arange(0, INNER)[:, None], inner + tl.arange(0, INNER)[None, :]
        skew = _load_skew(entries, rows, inner_columns, block)
        h, h_transposed = _load(gradient, inner_rows, columns, block), _load(gradient, columns, inner_rows, block)
        n_tile = tl.dot(skew, h - h_transposed, n_tile, input_precision=PRECISION)
        r_tile = tl.dot(skew, h + h_transposed, r_tile, input_precision=PRECISION)
    offsets = index.to(tl.int64) * block * block + rows * block + columns
    mask = (rows < block) & (columns < block)
    tl.store(n + offsets, n_tile, mask=mask)
    tl.store(r + offsets, r_tile, mask=mask)


@triton.jit
def _second_products_kernel(
    first_entries, second_entries, first_gradient, second_gradient, n, r, e,
    num_first, block, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``E = N - Y - Q R``."""
    index = tl.program_id(0)
    entries = _select(first_entries, second_entries, num_first, index, block * (block - 1) // 2)
    gradient = _select(first_gradient, second_gradient, num_first, index, block * block)
    start = index.to(tl.int64) * block * block
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    product = tl.zeros((TILE, TILE), tl.float32)
    for inner in range(0, block, INNER):
        inner_rows, inner_columns = inner + tl.arange(0, INNER)[:, None], inner + tl.arange(0, INNER)[None, :]
        skew = _load_skew(entries, rows, inner_columns, block)
        product = tl.dot(skew, _load(r + start, inner_rows, columns, block), product, input_precision=PRECISION)
    symmetric = _load(gradient, rows, columns, block) + _load(gradient, columns, rows, block)
    tile = _load(n + start, rows, columns, block) - symmetric - product
    tl.store(e + start + rows * block + columns, tile, mask=(rows < block) & (columns < block))


@triton.jit
def _packed_gradient_kernel(
    first_entries, second_entries, first_gradient, second_gradient, n, e, first_out, second_out,
    num_first, block, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of ``2K + F - F^T`` above the diagonal, where ``F = Q Z`` and so ``-F^T = Z^T Q``, Z = E + E^T + N."""
    index = tl.program_id(0)
    size = block * (block - 1) // 2
    entries = _select(first_entries, second_entries, num_first, index, size)
    gradient = _select(first_gradient, second_gradient, num_first, index, block * block)
    out = _select(first_out, second_out, num_first, index, size)
    start = index.to(tl.int64) * block * block
    n += start
    e += start
    if tl.program_id(1) > tl.program_id(2):
        return
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    tile = 2 * (_load(gradient, rows, columns, block) - _load(gradient, columns, rows, block))
    for inner in range(0, block, INNER):
        inner_rows, inner_columns = inner + tl.arange(0, INNER)[:, None], inner + tl.arange(0, INNER)[None, :]
        z = _load(e, inner_rows, columns, block) + _load(e, columns, inner_rows, block)
        z += _load(n, inner_rows, columns, block)
        tile = tl.dot(_load_skew(entries, rows, inner_columns, block), z, tile, input_precision=PRECISION)
        z = _load(e, rows, inner_columns, block) + _load(e, inner_columns, rows, block)
        z += _load(n, inner_columns, rows, block)
        tile = tl.dot(z, _load_skew(entries, inner_rows, columns, block), tile, input_precision=PRECISION)
    out += rows * (2 * block - rows - 1) // 2 + columns - rows - 1
    tl.store(out, tile.to(out.dtype.element_ty), mask=(rows < columns) & (columns < block))


def cayley_neumann(entries: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The operation `poetx::cayley_neumann` for one or two rotations, in one launch where their blocks are alike.

    Products take fp16 operands for 16-bit results and three TF32 products for fp32 ones, and accumulate in fp32.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"the GPU kernels give blocks in bf16, fp16 or fp32, not {dtype}: cast the activations")
    if not _alike(entries):
        return [cayley_neumann([each], dtype)[0] for each in entries]
    entries = [aligned(each) for each in entries]
    block = _block_size(entries[0])
    outs = [torch.empty(each.shape[0], block, block, dtype=dtype, device=each.device) for each in entries]
    num_first, total = entries[0].shape[0], sum(each.shape[0] for each in entries)
    size = max(16, triton.next_power_of_2(block))
    product, precision = (tl.float32, "tf32x3") if dtype == torch.float32 else (tl.float16, "tf32")
    if size * size * dtype.itemsize <= _resident_bytes(entries[0]):
        columns, halved = min(size, 64), size > 128
        launch(
            _resident_halves_kernel if halved else _resident_kernel,
            (total, triton.cdiv(block, columns), 1),
            (entries[0], entries[-1], outs[0], outs[-1]),
            (num_first, block),
            (size // 2 if halved else size, columns, product, precision),
            num_warps=max(1, min(8, size * columns // 1024)),
        )
        return outs
    out = torch.empty(total, block, block, dtype=dtype, device=entries[0].device)
    steps = [None, *torch.empty(2, *out.shape, dtype=torch.float32, device=out.device), out]
    tile = min(size, 64)
    for step in range(3):
        launch(
            _step_kernel,
            (total, triton.cdiv(block, tile), triton.cdiv(block, tile)),
            (entries[0], entries[-1], steps[step], steps[step + 1]),
            (num_first, block),
            (step == 0, step == 2, precision, tile, min(tile, 32)),
            num_warps=4,
        )
    return list(out.split([each.shape[0] for each in entries]))


def cayley_neumann_backward(
    gradients: Sequence[Tensor], entries: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The operation `poetx::cayley_neumann_backward` for one or two rotations, together where their blocks are alike.

    `dtype` is that of the blocks: 16-bit ones take their gradient in single TF32 products, fp32 ones in three.
    """
    if not _alike(entries):
        pairs = zip(gradients, entries, strict=True)
        return [cayley_neumann_backward([gradient], [each], dtype)[0] for gradient, each in pairs]
    entries = [aligned(each) for each in entries]
    gradients = [aligned(each.contiguous()) for each in gradients]
    block = _block_size(entries[0])
    outs = [torch.empty_like(each) for each in entries]
    num_first, total = entries[0].shape[0], sum(each.shape[0] for each in entries)
    n, r, e = torch.empty(3, total, block, block, dtype=torch.float32, device=entries[0].device)
    tile = min(64, max(16, triton.next_power_of_2(block)))
    tiles = triton.cdiv(block, tile)
    inputs = (entries[0], entries[-1], gradients[0], gradients[-1])
    for kernel, scratch in (
        (_first_products_kernel, (n, r)),
        (_second_products_kernel, (n, r, e)),
        (_packed_gradient_kernel, (n, e, outs[0], outs[-1])),
    ):
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
        launch(
            kernel,
            (total, tiles, tiles),
            (*inputs, *scratch),
            (num_first, block),
            (precision, tile, min(tile, 32)),
            num_warps=4,
        )
    return outs


def _alike(entries: Sequence[Tensor]) -> bool:
    """Whether these one or two tensors of packed entries can share a launch."""
    return len(entries) == 1 or (
        len(entries) == 2 and entries[0].shape[1] == entries[1].shape[1] and entries[0].dtype == entries[1].dtype
    )


def _block_size(entries: Tensor) -> int:
    return (1 + isqrt(1 + 8 * entries.shape[1])) // 2


def _resident_bytes(entries: Tensor) -> int:
    if not entries.is_cuda:
        return _SAFE_RESIDENT_BYTES
    return _RESIDENT_BYTES.get(torch.cuda.get_device_capability(entries.device)[0], _SAFE_RESIDENT_BYTES)
