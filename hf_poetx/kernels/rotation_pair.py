"""Two rotations of given shapes and types on the GPU: what kernels do with the one, the other and both together."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .cayley_neumann import block_size, cayley_neumann, cayley_neumann_backward, transform_of
from .launch import aligned, dot_precision
from .rotate import gradients_of, rotate_plan, with_contiguous_columns, with_contiguous_rows


class Side:
    """One of the rotations: how to apply it to rows, and how these are stored."""

    def __init__(
        self, tokens: int, width: int, block: int, group: int, row_major: bool, bias_dtype: torch.dtype | None,
        dtype: torch.dtype, device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        self.width, self.row_major, self.device = width, row_major, device
        self.num_blocks, self.rest = divmod(width, block)
        shape, common = (tokens, width), (dtype, device, precision)
        self._plan = rotate_plan(shape, block, group, False, row_major, None, *common)
        self._plan_with_bias = rotate_plan(shape, block, group, False, row_major, bias_dtype, *common)
        self._plan_transposed = rotate_plan(shape, block, group, True, row_major, None, *common)

    def stored(self, x: Tensor) -> Tensor:
        """The matrix x ``[tokens, width]`` in the order that the kernels take."""
        return aligned(with_contiguous_rows(x) if self.row_major else with_contiguous_columns(x))

    def tail_block(self, tail: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The block of the last columns from its packed entries; the identity if it has none."""
        if tail is not None:
            return cayley_neumann(tail, dtype)[0]
        # Not kept: made inside a CUDA graph, it would lie in that graph's memory.
        return torch.eye(self.rest, dtype=dtype, device=self.device) if self.rest else None

    def apply(
        self, x: Tensor, blocks: Tensor, tail_block: Tensor | None, permutation: Tensor,
        transpose: bool = False, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotate what `stored` returned, into the same order."""
        out = torch.empty_like(x)
        plan = self._plan_transposed if transpose else self._plan if bias is None else self._plan_with_bias
        if x.numel():
            plan(x, blocks, tail_block, permutation, bias if bias is None else aligned(bias), out)
        return out


class RotationPair:
    """The rotations of a layer's input and output side, and the launches that they share where their blocks are alike.

    Args:
        tokens: rows that each side rotates.
        widths: of the sides.
        counts: numbers of blocks.
        blocks: sizes of the blocks.
        groups: columns that the permutations move together.
        row_major: whether rows are stored by rows or by columns.
        entries_dtypes: of the packed entries.
        bias_dtype: of what is added to the second side's rows, or None.
        dtype: of the rows.
        device: that all is on.
        precision: of products, see `dot_precision`.
    """

    def __init__(
        self, tokens: tuple[int, int], widths: tuple[int, int], counts: tuple[int, int], blocks: tuple[int, int],
        groups: tuple[int, int], row_major: tuple[bool, bool], entries_dtypes: tuple[torch.dtype, torch.dtype],
        bias_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        common = (dtype, device, precision)
        per_side = zip(tokens, widths, blocks, groups, row_major, (None, bias_dtype), strict=True)
        self.sides = tuple(Side(*each, *common) for each in per_side)
        self._transforms = [
            transform_of((count,), block, entries_dtype, dtype, device)
            for count, block, entries_dtype in zip(counts, blocks, entries_dtypes, strict=True)
        ]
        together = blocks[0] == blocks[1] and entries_dtypes[0] == entries_dtypes[1]
        self._joint_transform = transform_of(counts, blocks[0], entries_dtypes[0], dtype, device) if together else None
        self._gradients = [
            gradients_of((width,), rows, block, (group,), by_rows, *common)
            for rows, width, block, group, by_rows in zip(tokens, widths, blocks, groups, row_major, strict=True)
        ]
        alike = together and tokens[0] == tokens[1] and row_major[0] == row_major[1]
        self._joint_gradients = None
        if alike and not any(side.rest for side in self.sides):
            self._joint_gradients = gradients_of(widths, tokens[0], blocks[0], groups, row_major[0], *common)

    def skew_and_blocks(self, entries: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Dense Q and blocks of both sides; where they are made together, the first ones go on with the second."""
        if self._joint_transform is None:
            skews = tuple(t.unpack(each) for t, each in zip(self._transforms, entries, strict=True))
            return skews, tuple(t.blocks(skew) for t, skew in zip(self._transforms, skews, strict=True))
        skew = self._joint_transform.unpack(*entries)
        blocks = self._joint_transform.blocks(skew)
        count = self.sides[0].num_blocks
        return (skew, skew[count:]), (blocks, blocks[count:])

    def entries_gradients(
        self,
        skews: Sequence[Tensor],
        operands: Sequence[tuple[Tensor, Tensor, Tensor] | None],
        entries: Sequence[Tensor],
        tails: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Gradients of the packed entries of each side that has operands, each followed by its tail's if it has one.

        Operands are what `rotation_gradient` takes: left, right and permutation.
        """
        if self._joint_gradients is not None and None not in operands:
            gradient, _ = self._joint_gradients(*operands)
            return self._joint_transform.gradient(skews[0], gradient, entries)
        results = []
        for index in (0, 1):
            if operands[index] is not None:
                gradient, tail_gradient = self._gradients[index](operands[index])
                transform, skew = self._transforms[index], skews[index]
                results += transform.gradient(skew, gradient, (entries[index],))
                if tails[index] is not None:
                    results.append(cayley_neumann_backward(tail_gradient[None], tails[index], skew.dtype))
        return results


_pair = lru_cache(4096)(RotationPair)


def pair_of(
    rows: Tensor, tokens: tuple[int, int], widths: tuple[int, int], entries_in: Tensor, entries_out: Tensor,
    groups: tuple[int, int], row_major: tuple[bool, bool], bias: Tensor | None = None,
) -> RotationPair:  # fmt: skip
    """The `RotationPair` for rows of this kind; one each, since it remembers its compiled kernels."""
    return _pair(
        tokens, widths, (entries_in.shape[0], entries_out.shape[0]), (block_size(entries_in), block_size(entries_out)),
        groups, row_major, (entries_in.dtype, entries_out.dtype), None if bias is None else bias.dtype,
        rows.dtype, rows.device, dot_precision(rows.dtype),
    )  # fmt: skip
