"""The POET-X linear layer on the GPU: products with the frozen weight between kernels of the two rotations.

Each rotation works on row-major activations where its permutation moves whole vectors and on column-major ones where it
moves single columns (`rotate`). The products with the weight take and give either, so only x, the result and their
gradients are ever converted. Both rotations share launches where their blocks are alike.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .cayley_neumann import block_size, cayley_neumann, cayley_neumann_backward, packed_gradient, transform, unpack
from .rotate import (
    Operands,
    moves_vectors,
    rotate_as_stored,
    rotation_gradients,
    with_contiguous_columns,
    with_contiguous_rows,
)


class _Side(NamedTuple):
    """A rotation: its packed entries, dense Q and blocks, and the order of the activations that it works on."""

    entries: Tensor
    tail: Tensor | None
    permutation: Tensor
    group: int
    skew: Tensor
    blocks: Tensor
    tail_block: Tensor | None
    row_major: bool

    def stored(self, x: Tensor) -> Tensor:
        return with_contiguous_rows(x) if self.row_major else with_contiguous_columns(x)

    def apply(self, x: Tensor, transpose: bool = False, bias: Tensor | None = None) -> Tensor:
        return rotate_as_stored(x, self.blocks, self.tail_block, self.permutation, self.group, transpose, bias)

    def operands(self, left: Tensor, right: Tensor) -> Operands:
        return Operands(left, right, self.permutation, self.group)


class _Layer(NamedTuple):
    """Both rotations; `skew` holds Q of both where their blocks are alike, else None."""

    side_in: _Side
    side_out: _Side
    skew: Tensor | None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operation `poetx::linear`; arguments and results as there."""
    side_in, side_out, _ = _layer(
        x.dtype, (entries_in, tail_in, permutation_in, group_in), (entries_out, tail_out, permutation_out, group_out)
    )
    rotated = side_in.apply(side_in.stored(x))
    inner = _multiply(rotated, weight.to(x.dtype).t(), side_out.row_major)
    result = side_out.apply(inner, bias=bias)
    return with_contiguous_rows(result), (inner if side_out.row_major else inner.t()).view(-1)


def backward(
    gradient: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The operation `poetx::linear_backward`; arguments and results as there."""
    needs_x, needs_bias, needs_in, needs_out = needs
    weight = weight.to(x.dtype)
    layer = _layer(
        x.dtype, (entries_in, tail_in, permutation_in, group_in), (entries_out, tail_out, permutation_out, group_out)
    )
    side_in, side_out, _ = layer
    stored_gradient = side_out.stored(gradient)
    results, trained = [], []
    if needs_in or (needs_out and kept is None):
        x = side_in.stored(x)
    if needs_x or needs_in:
        inner_gradient = _multiply(side_out.apply(stored_gradient, transpose=True), weight, side_in.row_major)
    if needs_x:
        results.append(with_contiguous_rows(side_in.apply(inner_gradient, transpose=True)))
    if needs_bias:
        results.append(gradient.sum(0))
    if needs_in:
        trained.append((side_in, side_in.operands(x, inner_gradient)))
    if needs_out:
        if kept is None:
            inner = _multiply(side_in.apply(x), weight.t(), side_out.row_major)
        elif side_out.row_major:
            inner = kept.view(gradient.shape)
        else:
            inner = kept.view(gradient.shape[::-1]).t()
        trained.append((side_out, side_out.operands(inner, stored_gradient)))
    return results + _entries_gradients(layer, trained)


def _layer(
    dtype: torch.dtype,
    rotation_in: tuple[Tensor, Tensor | None, Tensor, int],
    rotation_out: tuple[Tensor, Tensor | None, Tensor, int],
) -> _Layer:
    """Blocks of both rotations, each given as entries, tail, permutation and group."""
    entries_in, entries_out = rotation_in[0], rotation_out[0]
    if entries_in.shape[1] == entries_out.shape[1] and entries_in.dtype == entries_out.dtype:
        skew = unpack([entries_in, entries_out], dtype)
        counts = [entries_in.shape[0], entries_out.shape[0]]
        skews, blocks = skew.split(counts), transform(skew).split(counts)
    else:
        skew, skews = None, [unpack([entries], dtype) for entries in (entries_in, entries_out)]
        blocks = [transform(each) for each in skews]
    sides = []
    for (entries, tail, permutation, group), each, block in zip(
        (rotation_in, rotation_out), skews, blocks, strict=True
    ):
        tail_block = None if tail is None else cayley_neumann(tail, dtype)[0]
        row_major = moves_vectors(dtype, group, each.shape[1], permutation.shape[0])
        sides.append(_Side(entries, tail, permutation, group, each, block, tail_block, row_major))
    return _Layer(*sides, skew)


def _multiply(x: Tensor, matrix: Tensor, row_major: bool) -> Tensor:
    """``x @ matrix``, stored by rows or by columns."""
    return torch.mm(x, matrix) if row_major else torch.mm(matrix.t(), x.t()).t()


def _entries_gradients(layer: _Layer, trained: list[tuple[_Side, Operands]]) -> list[Tensor]:
    """Gradients of the packed entries of each side that is trained, each followed by its tail's if it has one."""
    side_in, side_out, skew = layer
    has_rest = any(side.blocks.shape[0] * side.blocks.shape[1] < side.permutation.shape[0] for side in layer[:2])
    if len(trained) == 2 and skew is not None and side_in.row_major == side_out.row_major and not has_rest:
        entries = [side.entries for side, _ in trained]
        partials, _ = rotation_gradients([operands for _, operands in trained], block_size(entries[0]))
        return packed_gradient(skew, partials, entries)
    results = []
    for side, operands in trained:
        partials, tail_partials = rotation_gradients([operands], block_size(side.entries))
        results += packed_gradient(side.skew, partials, [side.entries])
        if side.tail is not None:
            results.append(cayley_neumann_backward(tail_partials.sum(0)[None], side.tail, side.blocks.dtype))
    return results
