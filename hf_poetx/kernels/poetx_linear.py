"""The POET-X linear layer on the GPU: products with the frozen weight between kernels of the two rotations.

Each rotation works on row-major activations where its permutation moves whole vectors and on column-major ones where it
moves single columns (`rotate`). The products with the weight take and give either, so only x, the result and their
gradients are ever converted. Both rotations share launches where their blocks are alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cayley_neumann import block_size
from .rotate import moves_vectors, with_contiguous_rows
from .rotation_pair import RotationPair, pair_of


def _pair_of(
    x: Tensor, out_features: int, bias: Tensor | None, entries_in: Tensor, entries_out: Tensor, groups: tuple[int, int]
) -> RotationPair:
    tokens, in_features = x.shape
    row_major = (
        moves_vectors(x.dtype, groups[0], block_size(entries_in), in_features),
        moves_vectors(x.dtype, groups[1], block_size(entries_out), out_features),
    )
    return pair_of(
        x, (tokens, tokens), (in_features, out_features), entries_in, entries_out, groups, row_major, bias
    )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operation `poetx::linear`; arguments and results as there."""
    out_features, dtype = weight.shape[0], x.dtype
    pair = _pair_of(x, out_features, bias, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = pair.sides
    _, blocks = pair.skew_and_blocks((entries_in, entries_out))
    # Intermediate activations get no name, so that they are freed as soon as they have been used.
    inner = _multiply(
        side_in.apply(side_in.stored(x), blocks[0], side_in.tail_block(tail_in, dtype), permutation_in),
        weight.to(dtype).t(),
        side_out.row_major,
    )
    tail_block = side_out.tail_block(tail_out, dtype)
    result = side_out.apply(inner, blocks[1], tail_block, permutation_out, bias=bias)
    return with_contiguous_rows(result), (inner if side_out.row_major else inner.t()).view(-1)


def backward(
    gradient: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The operation `poetx::linear_backward`; arguments and results as there."""
    needs_x, needs_bias, needs_in, needs_out = needs
    dtype = x.dtype
    pair = _pair_of(x, weight.shape[0], None, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = pair.sides
    skews, blocks = pair.skew_and_blocks((entries_in, entries_out))
    tails = side_in.tail_block(tail_in, dtype), side_out.tail_block(tail_out, dtype)
    weight = weight.to(dtype)
    stored_gradient = side_out.stored(gradient)
    results, operands = [], [None, None]
    if needs_in or (needs_out and kept is None):
        x = side_in.stored(x)
    if needs_x or needs_in:
        inner_gradient = _multiply(
            side_out.apply(stored_gradient, blocks[1], tails[1], permutation_out, transpose=True),
            weight,
            side_in.row_major,
        )
    if needs_x:
        x_gradient = side_in.apply(inner_gradient, blocks[0], tails[0], permutation_in, transpose=True)
        results.append(with_contiguous_rows(x_gradient))
    if needs_bias:
        results.append(gradient.sum(0))
    if needs_in:
        operands[0] = (x, inner_gradient, permutation_in)
    if needs_out:
        if kept is None:
            inner = _multiply(side_in.apply(x, blocks[0], tails[0], permutation_in), weight.t(), side_out.row_major)
        elif side_out.row_major:
            inner = kept.view(gradient.shape)
        else:
            inner = kept.view(gradient.shape[::-1]).t()
        operands[1] = (inner, stored_gradient, permutation_out)
    return results + pair.entries_gradients(skews, operands, (entries_in, entries_out), (tail_in, tail_out))


def _multiply(x: Tensor, matrix: Tensor, row_major: bool) -> Tensor:
    """``x @ matrix``, stored by rows or by columns."""
    return torch.mm(x, matrix) if row_major else torch.mm(matrix.t(), x.t()).t()
