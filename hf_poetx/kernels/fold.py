"""Both rotations folded into the weight, on the GPU.

The input side rotates the rows of the weight, the output side those of its transpose, which are stored by columns.
"""

from collections.abc import Sequence

from torch import Tensor

from .cayley_neumann import block_size
from .rotate import moves_vectors
from .rotation_pair import RotationPair, pair_of


def _pair_of(weight: Tensor, entries_in: Tensor, entries_out: Tensor, groups: tuple[int, int]) -> RotationPair:
    out_features, in_features = weight.shape
    row_major = moves_vectors(weight.dtype, groups[0], block_size(entries_in), in_features), False
    return pair_of(
        weight, (out_features, in_features), (in_features, out_features), entries_in, entries_out, groups, row_major
    )


def forward(
    weight: Tensor,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> Tensor:  # fmt: skip
    """The operation `poetx::fold`; arguments and result as there."""
    pair = _pair_of(weight, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = pair.sides
    _, blocks = pair.skew_and_blocks((entries_in, entries_out))
    tails = side_in.tail_block(tail_in, weight.dtype), side_out.tail_block(tail_out, weight.dtype)
    rows = side_in.apply(side_in.stored(weight), blocks[0], tails[0], permutation_in, transpose=True)
    return side_out.apply(side_out.stored(rows.t()), blocks[1], tails[1], permutation_out).t()


def backward(
    gradient: Tensor, weight: Tensor,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The operation `poetx::fold_backward`; arguments and results as there."""
    needs_in, needs_out = needs
    pair = _pair_of(weight, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = pair.sides
    skews, blocks = pair.skew_and_blocks((entries_in, entries_out))
    weight, gradient = side_in.stored(weight), side_out.stored(gradient.t())
    operands = [None, None]
    if needs_in:
        tail = side_out.tail_block(tail_out, gradient.dtype)
        rows_gradient = side_out.apply(gradient, blocks[1], tail, permutation_out, transpose=True).t()
        # The rotation of the rows is transposed, so that its input stands on the right.
        operands[0] = (side_in.stored(rows_gradient), weight, permutation_in)
    if needs_out:
        tail = side_in.tail_block(tail_in, weight.dtype)
        rows = side_in.apply(weight, blocks[0], tail, permutation_in, transpose=True)
        operands[1] = (side_out.stored(rows.t()), gradient, permutation_out)
    return pair.entries_gradients(skews, operands, (entries_in, entries_out), (tail_in, tail_out))
