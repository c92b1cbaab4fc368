"""The POET-X linear layer on the GPU: products with the frozen weight between kernels of the two rotations.

Each rotation works on row-major activations where its permutation moves whole vectors and on column-major ones where it
moves single columns (`rotate`). The products with the weight take and give either, so only x, the result and their
gradients are ever converted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .cayley_neumann import cayley_neumann, cayley_neumann_backward
from .rotate import moves_vectors, rotate_as_stored, rotation_gradient, with_contiguous_columns, with_contiguous_rows


class _Side(NamedTuple):
    """A rotation with its dense blocks, and the order of the activations that it works on."""

    blocks: Tensor
    tail: Tensor | None
    permutation: Tensor
    group: int
    row_major: bool

    def stored(self, x: Tensor) -> Tensor:
        return with_contiguous_rows(x) if self.row_major else with_contiguous_columns(x)

    def apply(self, x: Tensor, transpose: bool = False, bias: Tensor | None = None) -> Tensor:
        return rotate_as_stored(x, self.blocks, self.tail, self.permutation, self.group, transpose, bias)

    def gradient(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return rotation_gradient(left, right, self.permutation, self.group, self.blocks.shape[1])


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operation `poetx::linear`; arguments and results as there."""
    side_in, side_out = _sides(
        x, entries_in, tail_in, permutation_in, group_in, entries_out, tail_out, permutation_out, group_out
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
    side_in, side_out = _sides(
        x, entries_in, tail_in, permutation_in, group_in, entries_out, tail_out, permutation_out, group_out
    )
    results, block_gradients, entries = [], [], []
    stored_gradient = side_out.stored(gradient)
    if needs_in or (needs_out and kept is None):
        x = side_in.stored(x)
    if needs_x or needs_in:
        inner_gradient = _multiply(side_out.apply(stored_gradient, transpose=True), weight, side_in.row_major)
    if needs_x:
        results.append(with_contiguous_rows(side_in.apply(inner_gradient, transpose=True)))
    if needs_bias:
        results.append(gradient.sum(0))
    if needs_in:
        block_gradients.append(side_in.gradient(x, inner_gradient))
        entries.append((entries_in, tail_in))
    if needs_out:
        if kept is None:
            inner = _multiply(side_in.apply(x), weight.t(), side_out.row_major)
        else:
            shape = gradient.shape if side_out.row_major else gradient.t().shape
            inner = kept.view(shape) if side_out.row_major else kept.view(shape).t()
        block_gradients.append(side_out.gradient(inner, stored_gradient))
        entries.append((entries_out, tail_out))
    return results + _entries_gradients(block_gradients, entries, x.dtype)


def _sides(
    x: Tensor,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> tuple[_Side, _Side]:  # fmt: skip
    blocks = cayley_neumann([entries_in, entries_out], x.dtype)
    tails = [None if tail is None else cayley_neumann([tail], x.dtype)[0][0] for tail in (tail_in, tail_out)]
    return tuple(
        _Side(each, tail, permutation, group, moves_vectors(x.dtype, group, each.shape[1], permutation.numel()))
        for each, tail, permutation, group in zip(
            blocks, tails, (permutation_in, permutation_out), (group_in, group_out), strict=True
        )
    )


def _multiply(x: Tensor, matrix: Tensor, row_major: bool) -> Tensor:
    """``x @ matrix``, stored by rows or by columns."""
    return torch.mm(x, matrix) if row_major else torch.mm(matrix.t(), x.t()).t()


def _entries_gradients(
    block_gradients: list[tuple[Tensor, Tensor]], entries: list[tuple[Tensor, Tensor | None]], dtype: torch.dtype
) -> list[Tensor]:
    """Gradients of the packed entries of each side that is trained, each followed by its tail's if it has one."""
    if not entries:
        return []
    gradients = cayley_neumann_backward([blocks for blocks, _ in block_gradients], [e for e, _ in entries], dtype)
    results = []
    for gradient, (_, tail_gradient), (_, tail) in zip(gradients, block_gradients, entries, strict=True):
        results.append(gradient)
        if tail is not None:
            results += cayley_neumann_backward([tail_gradient[None]], [tail], dtype)
    return results
