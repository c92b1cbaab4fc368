"""Triton kernels of the rotation: block products with both permutations in their loads and stores, and their gradient.

A permutation that moves columns in groups of 16 bytes or more costs nothing there: whole vectors move. Single columns
would ruin the loads of a row-major activation, so such a permutation works on column-major ones, where a column is
contiguous; `with_contiguous_columns` converts, and products with the weight take and give either order for free.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    Plan,
    aligned,
    ceil_divide,
    dot_precision,
    is_hopper,
    next_power_of_two,
    num_multiprocessors,
    power_of_two_divisor,
)


class Tiles(NamedTuple):
    """Tile sizes of a product [rows, inner] @ [inner, columns], warps per program and depth of the load pipeline."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# Measured on an H200 for 16-bit activations (benchmarks/LOG.md); the small tiles fit every GPU and are untuned.
_ROTATE_TILES = Tiles(64, 128, 64, 4, 3)
_GRADIENT_TILES = Tiles(128, 128, 64, 4, 4)
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
    if tail is not None:
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
def _offsets(tokens, columns, stride, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr, CONTIGUITY: tl.constexpr):
    """Where elements are; with the promise, hidden behind the choice of a rotation, that neighbors load together."""
    if ROW_MAJOR:
        offsets = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
        if ALIGNED:
            offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, CONTIGUITY)), (1, CONTIGUITY))
    else:
        offsets = tokens[:, None] + columns[None, :] * stride
        if ALIGNED:
            offsets = tl.max_contiguous(tl.multiple_of(offsets, (16, 1)), (16, 1))
    return offsets


@triton.jit
def _gradient_kernel(
    first_left, first_right, first_permutation, second_left, second_right, second_permutation, blocks, tail,
    tokens, tokens_per_split, num_first, num_blocks, rest, first_stride, second_stride,
    BLOCK: tl.constexpr, CONTIGUITY: tl.constexpr, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of a block's gradient, of one rotation (with a tail, the block after the last) or of two (without)."""
    row_tiles: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    program, split = tl.program_id(0), tl.program_id(1)
    index = program // (row_tiles * column_tiles)
    matrix, size = blocks + (split.to(tl.int64) * num_blocks + index) * BLOCK * BLOCK, BLOCK
    if tail is not None:
        if index == num_blocks:
            matrix, size = tail + split.to(tl.int64) * rest * rest, rest
    left, right, permutation, start, stride = first_left, first_right, first_permutation, index * BLOCK, first_stride
    if second_left is not None:
        if index >= num_first:
            left, right, permutation = second_left, second_right, second_permutation
            start, stride = start - num_first * BLOCK, second_stride
    rows = program // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = program % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    left_columns = _columns(permutation, start, rows, size, CONTIGUITY, MASKED)
    right_columns = _columns(permutation, start, columns, size, CONTIGUITY, MASKED)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    for token_start in range(first, last, INNER):
        token = token_start + tl.arange(0, INNER)
        mask = token[:, None] < last
        x_offsets = _offsets(token, left_columns, stride, ROW_MAJOR, ALIGNED, CONTIGUITY)
        y_offsets = _offsets(token, right_columns, stride, ROW_MAJOR, ALIGNED, CONTIGUITY)
        if MASKED:
            x = tl.load(left + x_offsets, mask=mask & (rows < size)[None, :], other=0.0)
            y = tl.load(right + y_offsets, mask=mask & (columns < size)[None, :], other=0.0)
        else:
            x = tl.load(left + x_offsets, mask=mask, other=0.0)
            y = tl.load(right + y_offsets, mask=mask, other=0.0)
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
    num_blocks, block, _ = blocks.shape
    row_major = moves_vectors(x.dtype, permutation_group, block, x.shape[1])
    x = aligned(with_contiguous_rows(x) if row_major else with_contiguous_columns(x))
    rest = x.shape[1] - num_blocks * block
    if rest and tail is None:
        tail = torch.eye(rest, dtype=x.dtype, device=x.device)
    plan = rotate_plan(
        x.shape, block, permutation_group, transpose, row_major, None if bias is None else bias.dtype,
        x.dtype, x.device, dot_precision(x.dtype),
    )  # fmt: skip
    out = torch.empty_like(x)
    if x.numel():
        plan(x, aligned(blocks), tail, permutation, bias if bias is None else aligned(bias), out)
    return with_contiguous_rows(out)


def rotation_gradient(
    left: Tensor, right: Tensor, permutation: Tensor, permutation_group: int, block: int
) -> tuple[Tensor, Tensor]:
    """The operation `poetx::rotation_gradient` for bf16, fp16 and fp32; arguments and result as there."""
    row_major = moves_vectors(left.dtype, permutation_group, block, left.shape[1])
    convert = with_contiguous_rows if row_major else with_contiguous_columns
    gradients = gradients_of(
        (left.shape[1],), left.shape[0], block, (permutation_group,), row_major,
        left.dtype, left.device, dot_precision(left.dtype),
    )  # fmt: skip
    blocks, tail = gradients((aligned(convert(left)), aligned(convert(right)), permutation))
    return blocks, blocks.new_empty(0, 0) if tail is None else tail


@lru_cache(4096)
def rotate_plan(
    shape: torch.Size, block: int, permutation_group: int, transpose: bool, row_major: bool,
    bias_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device, precision: str,
) -> Plan:  # fmt: skip
    """Plan for ``(x, blocks, tail, permutation, bias, out)``, both activations row-major or both column-major.

    Columns that no block covers need a tail. Raises TypeError for a dtype that the kernels do not compute in.
    """
    _check_dtype(dtype)
    tokens, width = shape
    num_blocks, rest = divmod(width, block)
    tuned = dtype.itemsize == 2 and is_hopper(device)
    tiles = _fit(_ROTATE_TILES if tuned else _SAFE_TILES, tokens, block, block)
    masked = rest > 0 or block % tiles.columns > 0 or block % tiles.inner > 0
    programs = ceil_divide(tokens, tiles.rows) * ceil_divide(block, tiles.columns) * (num_blocks + (rest > 0))
    integers = (tokens, num_blocks, rest, *((width, 1) if row_major else (1, tokens)))
    contiguity = _contiguity(permutation_group, block, width)
    constants = (block, transpose, contiguity, masked, precision, *tiles[:3])
    return Plan(_rotate_kernel, (programs, 1, 1), integers, constants, *tiles[3:])


class Gradients:
    """Gradients of the blocks of one rotation, or of two without tail in one launch, for given shapes and types.

    Args:
        widths: of the rotations.
        tokens: rows of the activations.
        block: size of all blocks.
        permutation_groups: of the rotations.
        row_major: how all activations are stored, by rows or by columns.
        dtype: of the activations.
        device: that all is on.
        precision: of products, see `dot_precision`.
    """

    def __init__(
        self, widths: tuple[int, ...], tokens: int, block: int, permutation_groups: tuple[int, ...], row_major: bool,
        dtype: torch.dtype, device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        _check_dtype(dtype)
        counts = [width // block for width in widths]
        rest = widths[0] % block
        tiles = _fit(
            _GRADIENT_TILES if dtype.itemsize == 2 and is_hopper(device) else _SAFE_TILES, block, block, tokens
        )
        strides = [width if row_major else tokens for width in widths]
        aligned_strides = all(stride * dtype.itemsize % 16 == 0 for stride in strides)
        contiguity = min(_contiguity(g, block, w) for g, w in zip(permutation_groups, widths, strict=True))
        masked = rest > 0 or block % tiles.rows > 0 or block % tiles.columns > 0
        per_block = ceil_divide(block, tiles.rows) * ceil_divide(block, tiles.columns)
        programs = per_block * (sum(counts) + (rest > 0))
        self.splits, tokens_per_split = _split(programs, tokens, tiles.inner, num_multiprocessors(device))
        integers = (tokens, tokens_per_split, counts[0], sum(counts), rest, strides[0], strides[-1])
        constants = (block, contiguity, row_major, aligned_strides, masked, precision, *tiles[:3])
        self._plan = Plan(_gradient_kernel, (programs, self.splits, 1), integers, constants, *tiles[3:])
        parts = (self.splits,) if self.splits > 1 else ()
        self._shape, self._tail_shape = (*parts, sum(counts), block, block), (*parts, rest, rest) if rest else None
        self._device = device

    def __call__(
        self, first: Sequence[Tensor], second: Sequence[Tensor] = (None, None, None)
    ) -> tuple[Tensor, Tensor | None]:
        """``left^T right`` of each block, given left, right and permutation of each rotation.

        Returns:
            ``[num_blocks, block, block]`` and, where blocks do not cover all columns, ``[rest, rest]``, in fp32; the
            blocks of the second rotation follow those of the first. Parts of the tokens are summed in a fixed order,
            so the result does not depend on which program finishes first.
        """
        blocks = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        tail = self._tail_shape and torch.empty(self._tail_shape, dtype=torch.float32, device=self._device)
        self._plan(*first, *second, blocks, tail)
        if self.splits > 1:
            return blocks.sum(0), None if tail is None else tail.sum(0)
        return blocks, tail


@lru_cache(4096)
def gradients_of(
    widths: tuple[int, ...], tokens: int, block: int, permutation_groups: tuple[int, ...], row_major: bool,
    dtype: torch.dtype, device: torch.device, precision: str,
) -> Gradients:  # fmt: skip
    """The `Gradients` for these shapes and types; one each, since it remembers its compiled kernel."""
    return Gradients(widths, tokens, block, permutation_groups, row_major, dtype, device, precision)


def with_contiguous_columns(x: Tensor) -> Tensor:
    """The matrix x, stored column by column."""
    return x if x.t().is_contiguous() else _transposed(x).t()


def with_contiguous_rows(x: Tensor) -> Tensor:
    """The matrix x, stored row by row."""
    return x if x.is_contiguous() else _transposed(x.t())


def _transposed(x: Tensor) -> Tensor:
    """A new row-major tensor with the values of ``x.t()``, at nearly the speed of a copy."""
    x = aligned(x.contiguous())
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
    if x.numel():
        _transpose_plan(x.shape, x.dtype, x.device)(x, out)
    return out


def moves_vectors(dtype: torch.dtype, permutation_group: int, block: int, width: int) -> bool:
    """Whether the permutation moves whole vectors of row-major activations."""
    return _contiguity(permutation_group, block, width) * dtype.itemsize >= _VECTOR_BYTES


def _contiguity(permutation_group: int, block: int, width: int) -> int:
    """Columns of a block that are neighbors in memory, starting at a multiple of their number."""
    return min(16, power_of_two_divisor(permutation_group, block, width))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"the rotation's GPU kernels compute in bf16, fp16 or fp32, not {dtype}: cast x")


@lru_cache(4096)
def _transpose_plan(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Plan:
    rows, columns = shape
    grid = (ceil_divide(columns, 64), ceil_divide(rows, 64), 1)
    return Plan(_transpose_kernel, grid, (rows, columns), (64,), num_warps=4)


def _fit(tiles: Tiles, rows: int, columns: int, inner: int) -> Tiles:
    """Tiles no larger than the problem, but no smaller than the matrix units' 16."""
    fit = [min(tile, next_power_of_two(n, 16)) for tile, n in zip(tiles[:3], (rows, columns, inner), strict=True)]
    return Tiles(*fit, *tiles[3:])


def _split(programs: int, tokens: int, inner: int, num_multiprocessors: int) -> tuple[int, int]:
    """Into how many parts to split the tokens, and the tokens of each: few blocks and many tokens need more programs."""
    splits = max(1, min(num_multiprocessors // max(1, programs), tokens // 2048))
    tokens_per_split = max(1, ceil_divide(ceil_divide(tokens, splits), inner)) * inner
    return max(1, ceil_divide(tokens, tokens_per_split)), tokens_per_split
