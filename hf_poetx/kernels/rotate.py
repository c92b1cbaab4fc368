"""Triton kernels of the rotation: block products with both permutations in their loads and stores, and their gradient.

A permutation that moves columns in groups of 16 bytes or more costs nothing there: whole vectors move. Single columns
would ruin the loads of a row-major activation, so such a permutation works on column-major ones, where a column is
contiguous; `with_contiguous_columns` converts, and products with the weight take and give either order for free.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch, power_of_two_divisor


class Tiles(NamedTuple):
    """Tile sizes of a product [rows, inner] @ [inner, columns], warps per program and depth of the load pipeline."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# Measured on an H200 (benchmarks/LOG.md); elsewhere the small tiles fit every GPU and are untuned.
_PRODUCT_TILES = {9: Tiles(128, 128, 64, 8, 3)}
_GRADIENT_TILES = {9: Tiles(128, 128, 64, 8, 3)}
_SAFE_TILES = Tiles(64, 64, 32, 4, 2)
# Columns that move together, in bytes, from which on row-major activations load and store in whole vectors.
_VECTOR_BYTES = 16


@triton.jit
def _columns(permutation, start, offsets, limit, CONTIGUITY: tl.constexpr, MASKED: tl.constexpr):
    """Columns of the activation that the columns start + offsets of the permuted order are."""
    if MASKED:
        columns = tl.load(permutation + start + offsets, mask=offsets < limit, other=0)
    else:
        columns = tl.load(permutation + start + offsets)
    return tl.max_contiguous(tl.multiple_of(columns, CONTIGUITY), CONTIGUITY).to(tl.int64)


@triton.jit
def _rotate_kernel(
    x, blocks, tail, permutation, bias, out,
    tokens, num_blocks, rest, row_stride, column_stride,
    BLOCK: tl.constexpr, TRANSPOSE: tl.constexpr, CONTIGUITY: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # Programs of the same rows follow one another, so that the scattered pieces of a row meet in the cache.
    tiles: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    programs = tiles * (num_blocks + (rest > 0))
    program = tl.program_id(0)
    row_start, index = program // programs * ROWS, program % programs
    block, column_start = index // tiles, index % tiles * COLUMNS
    matrix, size = blocks + block.to(tl.int64) * BLOCK * BLOCK, BLOCK
    if MASKED:
        if block == num_blocks:
            matrix, size = tail, rest

    rows = row_start + tl.arange(0, ROWS)
    in_rows = rows[:, None] < tokens
    row_offsets = rows.to(tl.int64)[:, None] * row_stride
    outer = column_start + tl.arange(0, COLUMNS)
    columns = _columns(permutation, block * BLOCK, outer, size, CONTIGUITY, MASKED)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, BLOCK, INNER):
        inner = start + tl.arange(0, INNER)
        sources = _columns(permutation, block * BLOCK, inner, size, CONTIGUITY, MASKED)
        if TRANSPOSE:
            entries = matrix + outer[None, :] * size + inner[:, None]
        else:
            entries = matrix + inner[:, None] * size + outer[None, :]
        if MASKED:
            left = tl.load(
                x + row_offsets + sources[None, :] * column_stride, mask=in_rows & (inner < size)[None, :], other=0.0
            )
            right = tl.load(entries, mask=(inner < size)[:, None] & (outer < size)[None, :], other=0.0)
        else:
            left = tl.load(x + row_offsets + sources[None, :] * column_stride, mask=in_rows, other=0.0)
            right = tl.load(entries)
        product = tl.dot(left, right, product, input_precision=PRECISION)
    in_columns = outer < size
    if bias is not None:
        product += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    targets = out + row_offsets + columns[None, :] * column_stride
    if MASKED:
        tl.store(targets, product.to(out.dtype.element_ty), mask=in_rows & in_columns[None, :])
    else:
        tl.store(targets, product.to(out.dtype.element_ty), mask=in_rows)


@triton.jit
def _gradient_kernel(
    left, right, permutation, blocks, tail,
    tokens, tokens_per_split, num_blocks, rest, row_stride, column_stride,
    BLOCK: tl.constexpr, CONTIGUITY: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row_tiles: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    program, split = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = program // (row_tiles * column_tiles)
    row_start = program // column_tiles % row_tiles * ROWS
    column_start = program % column_tiles * COLUMNS
    matrix, size = blocks + (split * num_blocks + block) * BLOCK * BLOCK, BLOCK
    if MASKED:
        if block == num_blocks:
            matrix, size = tail + split * rest * rest, rest

    rows = row_start + tl.arange(0, ROWS)
    columns = column_start + tl.arange(0, COLUMNS)
    left_columns = _columns(permutation, block * BLOCK, rows, size, CONTIGUITY, MASKED)
    right_columns = _columns(permutation, block * BLOCK, columns, size, CONTIGUITY, MASKED)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    for start in range(first, last, INNER):
        token = start + tl.arange(0, INNER)
        in_tokens = token[:, None] < last
        offsets = token.to(tl.int64)[:, None] * row_stride
        if MASKED:
            in_left, in_right = in_tokens & (rows < size)[None, :], in_tokens & (columns < size)[None, :]
        else:
            in_left, in_right = in_tokens, in_tokens
        x = tl.load(left + offsets + left_columns[None, :] * column_stride, mask=in_left, other=0.0)
        y = tl.load(right + offsets + right_columns[None, :] * column_stride, mask=in_right, other=0.0)
        product = tl.dot(tl.trans(x), y, product, input_precision=PRECISION)
    targets = matrix + rows[:, None] * size + columns[None, :]
    if MASKED:
        tl.store(targets, product, mask=(rows < size)[:, None] & (columns < size)[None, :])
    else:
        tl.store(targets, product)


@triton.jit
def _transpose_kernel(x, out, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out + column.to(tl.int64)[None, :] * rows + row[:, None], values, mask=mask)


def rotate(
    x: Tensor,
    blocks: Tensor,
    tail: Tensor | None,
    permutation: Tensor,
    permutation_group: int,
    transpose: bool,
    bias: Tensor | None,
) -> Tensor:
    """The operation `poetx::rotate` for bf16, fp16 and fp32; arguments and result as there."""
    if not moves_vectors(x.dtype, permutation_group, blocks.shape[1], x.shape[1]):
        x = with_contiguous_columns(x)
    return with_contiguous_rows(rotate_as_stored(x, blocks, tail, permutation, permutation_group, transpose, bias))


def rotate_as_stored(
    x: Tensor,
    blocks: Tensor,
    tail: Tensor | None,
    permutation: Tensor,
    permutation_group: int,
    transpose: bool,
    bias: Tensor | None,
) -> Tensor:
    """`rotate` of row-major or column-major x; the result is stored in the same order."""
    _check_dtype(x)
    tokens, width = x.shape
    num_blocks, block, _ = blocks.shape
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    rest = width - num_blocks * block
    if rest and tail is None:
        tail = torch.eye(rest, dtype=x.dtype, device=x.device)
    tiles = _fit(_tiles(x, _PRODUCT_TILES), tokens, block, block)
    masked = rest > 0 or block % tiles.columns > 0 or block % tiles.inner > 0
    programs = triton.cdiv(tokens, tiles.rows) * triton.cdiv(block, tiles.columns) * (num_blocks + (rest > 0))
    launch(
        _rotate_kernel,
        (programs, 1, 1),
        (x, aligned(blocks), tail, permutation, bias, out),
        (tokens, num_blocks, rest, *x.stride()),
        (block, transpose, _contiguity(permutation_group, block, width), masked, _precision(x), *tiles[:3]),
        tiles.num_warps,
        tiles.num_stages,
    )
    return out


def rotation_gradient(
    left: Tensor, right: Tensor, permutation: Tensor, permutation_group: int, block: int
) -> tuple[Tensor, Tensor]:
    """The operation `poetx::rotation_gradient` for bf16, fp16 and fp32; arguments and result as there."""
    _check_dtype(left)
    convert = (
        with_contiguous_rows
        if moves_vectors(left.dtype, permutation_group, block, left.shape[1])
        else with_contiguous_columns
    )
    left, right = aligned(convert(left)), aligned(convert(right))
    tokens, width = left.shape
    num_blocks, rest = divmod(width, block)
    tiles = _fit(_tiles(left, _GRADIENT_TILES), block, block, tokens)
    masked = rest > 0 or block % tiles.rows > 0 or block % tiles.columns > 0
    programs = triton.cdiv(block, tiles.rows) * triton.cdiv(block, tiles.columns) * (num_blocks + (rest > 0))
    splits, tokens_per_split = _split(programs, tokens, tiles.inner)
    blocks = torch.empty(splits, num_blocks, block, block, dtype=torch.float32, device=left.device)
    tail = torch.empty(splits, rest, rest, dtype=torch.float32, device=left.device)
    launch(
        _gradient_kernel,
        (programs, splits, 1),
        (left, right, permutation, blocks, tail),
        (tokens, tokens_per_split, num_blocks, rest, *left.stride()),
        (block, _contiguity(permutation_group, block, width), masked, _precision(left), *tiles[:3]),
        tiles.num_warps,
        tiles.num_stages,
    )
    # Partial sums are added in a fixed order, so the result does not depend on which program finished first.
    return (blocks[0], tail[0]) if splits == 1 else (blocks.sum(0), tail.sum(0))


def with_contiguous_columns(x: Tensor) -> Tensor:
    """The matrix x, stored column by column."""
    return x if x.t().is_contiguous() else _transposed(x).t()


def with_contiguous_rows(x: Tensor) -> Tensor:
    """The matrix x, stored row by row."""
    return x if x.is_contiguous() else _transposed(x.t())


def _transposed(x: Tensor) -> Tensor:
    """A new row-major tensor with the values of ``x.t()``, at nearly the speed of a copy."""
    x = aligned(x.contiguous())
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(columns, 64), triton.cdiv(rows, 64), 1)
        launch(_transpose_kernel, grid, (x, out), (rows, columns), (64,), num_warps=4)
    return out


def moves_vectors(dtype: torch.dtype, permutation_group: int, block: int, width: int) -> bool:
    """Whether the permutation moves whole vectors of row-major activations."""
    return _contiguity(permutation_group, block, width) * dtype.itemsize >= _VECTOR_BYTES


def _contiguity(permutation_group: int, block: int, width: int) -> int:
    """Columns of a block that are neighbors in memory, starting at a multiple of their number."""
    return min(16, power_of_two_divisor(permutation_group, block, width))


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"the rotation's GPU kernels compute in bf16, fp16 or fp32, not {x.dtype}: cast x")


def _precision(x: Tensor) -> str:
    """Products of fp32 follow PyTorch's own switch; three TF32 products give the accuracy of fp32."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tiles(x: Tensor, tuned: dict[int, Tiles]) -> Tiles:
    if x.is_cuda and x.element_size() == 2:
        return tuned.get(torch.cuda.get_device_capability(x.device)[0], _SAFE_TILES)
    return _SAFE_TILES


def _fit(tiles: Tiles, rows: int, columns: int, inner: int) -> Tiles:
    """Tiles no larger than the problem, but no smaller than the matrix units' 16."""
    fit = [min(t, max(16, triton.next_power_of_2(n))) for t, n in zip(tiles, (rows, columns, inner), strict=False)]
    return Tiles(*fit, tiles.num_warps, tiles.num_stages)


def _split(programs: int, tokens: int, inner: int) -> tuple[int, int]:
    """Into how many parts to split the tokens, and the tokens of each: few blocks and many tokens need more programs."""
    splits = max(1, min(128 // programs, tokens // 4096))
    tokens_per_split = triton.cdiv(triton.cdiv(tokens, splits), inner) * inner
    return max(1, triton.cdiv(tokens, tokens_per_split)) if tokens else 1, max(tokens_per_split, inner)
