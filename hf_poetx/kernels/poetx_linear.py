"""The POET-X linear layer on the GPU: products with the frozen weight between kernels of the two rotations.

Each rotation works on row-major activations where its permutation moves whole vectors and on column-major ones where it
moves single columns (`rotate`). The products with the weight take and give either, so only x, the result and their
gradients are ever converted. Both rotations share launches where their blocks are alike.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .cayley_neumann import block_size, cayley_neumann, cayley_neumann_backward, transform_of
from .launch import aligned, dot_precision
from .rotate import gradients_of, moves_vectors, rotate_plan, with_contiguous_columns, with_contiguous_rows


class _Side:
    """One rotation of layers with given shapes and types: how to apply it, and the order of its activations."""

    def __init__(
        self, tokens: int, width: int, block: int, group: int, bias_dtype: torch.dtype | None, dtype: torch.dtype,
        device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        self.width, self.group, self.device = width, group, device
        self.num_blocks, self.rest = divmod(width, block)
        self.row_major = moves_vectors(dtype, group, block, width)
        shape, common = (tokens, width), (dtype, device, precision)
        self._plan = rotate_plan(shape, block, group, False, self.row_major, None, *common)
        self._plan_with_bias = rotate_plan(shape, block, group, False, self.row_major, bias_dtype, *common)
        self._plan_transposed = rotate_plan(shape, block, group, True, self.row_major, None, *common)

    def stored(self, x: Tensor) -> Tensor:
        return aligned(with_contiguous_rows(x) if self.row_major else with_contiguous_columns(x))

    def tail_block(self, tail: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tail is not None:
            return cayley_neumann(tail, dtype)[0]
        # Not kept: made inside a CUDA graph, it would lie in that graph's memory.
        return torch.eye(self.rest, dtype=dtype, device=self.device) if self.rest else None

    def apply(
        self, x: Tensor, blocks: Tensor, tail_block: Tensor | None, permutation: Tensor,
        transpose: bool = False, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(x)
        plan = self._plan_transposed if transpose else self._plan if bias is None else self._plan_with_bias
        if x.numel():
            plan(x, blocks, tail_block, permutation, bias if bias is None else aligned(bias), out)
        return out


class _Layer:
    """Layers with given shapes and types: their two sides, and what the sides do together."""

    def __init__(
        self, shape: torch.Size, out_features: int, groups: tuple[int, int], counts: tuple[int, int],
        blocks: tuple[int, int], entries_dtypes: tuple[torch.dtype, torch.dtype], bias_dtype: torch.dtype | None,
        dtype: torch.dtype, device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        tokens, in_features = shape
        common = (dtype, device, precision)
        widths = (in_features, out_features)
        self.sides = tuple(
            _Side(tokens, width, block, group, bias, *common)
            for width, block, group, bias in zip(widths, blocks, groups, (None, bias_dtype), strict=True)
        )
        together = blocks[0] == blocks[1] and entries_dtypes[0] == entries_dtypes[1]
        self.transforms = [
            transform_of((count,), block, entries_dtype, dtype, device)
            for count, block, entries_dtype in zip(counts, blocks, entries_dtypes, strict=True)
        ]
        self.joint_transform = transform_of(counts, blocks[0], entries_dtypes[0], dtype, device) if together else None
        self.gradients = [
            gradients_of((side.width,), tokens, block, (side.group,), side.row_major, *common)
            for side, block in zip(self.sides, blocks, strict=True)
        ]
        self.joint_gradients = None
        if together and self.sides[0].row_major == self.sides[1].row_major and not any(s.rest for s in self.sides):
            self.joint_gradients = gradients_of(
                widths, tokens, blocks[0], groups, self.sides[0].row_major, *common
            )  # fmt: skip

    def skew_and_blocks(self, entries: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Dense Q and blocks of both sides; where they are made together, the first ones go on with the second."""
        if self.joint_transform is None:
            skews = tuple(t.unpack(each) for t, each in zip(self.transforms, entries, strict=True))
            return skews, tuple(t.blocks(skew) for t, skew in zip(self.transforms, skews, strict=True))
        skew = self.joint_transform.unpack(*entries)
        blocks = self.joint_transform.blocks(skew)
        count = self.sides[0].num_blocks
        return (skew, skew[count:]), (blocks, blocks[count:])


_layer = lru_cache(4096)(_Layer)


def _layer_of(
    x: Tensor, out_features: int, bias: Tensor | None, entries_in: Tensor, entries_out: Tensor, groups: tuple[int, int]
) -> _Layer:
    return _layer(
        x.shape, out_features, groups, (entries_in.shape[0], entries_out.shape[0]),
        (block_size(entries_in), block_size(entries_out)), (entries_in.dtype, entries_out.dtype),
        None if bias is None else bias.dtype, x.dtype, x.device, dot_precision(x.dtype),
    )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    entries_in: Tensor, tail_in: Tensor | None, permutation_in: Tensor, group_in: int,
    entries_out: Tensor, tail_out: Tensor | None, permutation_out: Tensor, group_out: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operation `poetx::linear`; arguments and results as there."""
    out_features, dtype = weight.shape[0], x.dtype
    layer = _layer_of(x, out_features, bias, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = layer.sides
    _, blocks = layer.skew_and_blocks((entries_in, entries_out))
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
    layer = _layer_of(x, weight.shape[0], None, entries_in, entries_out, (group_in, group_out))
    side_in, side_out = layer.sides
    skews, blocks = layer.skew_and_blocks((entries_in, entries_out))
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
    return results + _entries_gradients(layer, skews, operands, (entries_in, entries_out), (tail_in, tail_out))


def _multiply(x: Tensor, matrix: Tensor, row_major: bool) -> Tensor:
    """``x @ matrix``, stored by rows or by columns."""
    return torch.mm(x, matrix) if row_major else torch.mm(matrix.t(), x.t()).t()


def _entries_gradients(
    layer: _Layer,
    skews: Sequence[Tensor],
    operands: Sequence[tuple[Tensor, Tensor, Tensor] | None],
    entries: Sequence[Tensor],
    tails: Sequence[Tensor | None],
) -> list[Tensor]:
    """Gradients of the packed entries of each side that has operands, each followed by its tail's if it has one."""
    if layer.joint_gradients is not None and None not in operands:
        gradient, _ = layer.joint_gradients(*operands)
        return layer.joint_transform.gradient(skews[0], gradient, entries)
    results = []
    for index in (0, 1):
        if operands[index] is not None:
            gradient, tail_gradient = layer.gradients[index](operands[index])
            transform, skew = layer.transforms[index], skews[index]
            results += transform.gradient(skew, gradient, (entries[index],))
            if tails[index] is not None:
                results.append(cayley_neumann_backward(tail_gradient[None], tails[index], skew.dtype))
    return results
