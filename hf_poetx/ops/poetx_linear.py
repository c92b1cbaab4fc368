"""The POET-X linear layer: a frozen weight between two trained rotations, with two activation memory modes.

    a = R_in(x);  b = a W^T;  y = R_out(b) + bias

Input-centric: activations are rotated, never the weight. The dense blocks are rebuilt from the packed skew entries in
the backward pass instead of being kept.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cayley_neumann import cayley_neumann, cayley_neumann_backward
from .rotate import rotate, rotation_gradient
from .skew import block_size


class Rotation(NamedTuple):
    """One trained rotation: packed skew entries of blocks and tail, and the permutation they act under.

    Shapes: `entries` ``[num_blocks, block (block - 1) / 2]``, `tail` ``[1, rest (rest - 1) / 2]`` or None where fewer
    than two columns remain, `permutation` ``[width]`` int32, moved in groups of `permutation_group` columns.
    """

    entries: Tensor
    tail: Tensor | None
    permutation: Tensor
    permutation_group: int

    def blocks(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Dense Cayley-Neumann blocks and tail of the given dtype."""
        tail = None if self.tail is None else cayley_neumann(self.tail, dtype)[0]
        return cayley_neumann(self.entries, dtype), tail

    def apply(self, x: Tensor, *, transpose: bool = False, bias: Tensor | None = None) -> Tensor:
        """Rotate the last dimension of x ``[..., width]``; differentiable in x and in the entries."""
        blocks, tail = self.blocks(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        return rotate(rows, blocks, tail, self.permutation, self.permutation_group, transpose, bias).view(x.shape)


def poetx_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rotation_in: Rotation, rotation_out: Rotation, memory_mode: str
) -> Tensor:
    """Apply a frozen linear layer between two rotations.

    Args:
        x: ``[..., in_features]``, floating point; it sets the dtype of the products.
        weight: ``[out_features, in_features]``, natural order; gets no gradient.
        bias: ``[out_features]`` or None, added outside the rotations.
        rotation_in: of the input features.
        rotation_out: of the output features.
        memory_mode: "fast" saves x and b for the backward pass, "mem" saves x alone and recomputes b.

    Returns:
        ``[..., out_features]`` of the dtype of x.

    Source: POET-X, input-centric forward pass and activation checkpointing.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = _PoetXLinear.apply(rows, weight, bias, *rotation_in, *rotation_out, memory_mode)
    return result.view(*x.shape[:-1], weight.shape[0])


class _PoetXLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias,
        entries_in, tail_in, permutation_in, group_in,
        entries_out, tail_out, permutation_out, group_out,
        memory_mode,
    ):  # fmt: skip
        rotation_in = Rotation(entries_in, tail_in, permutation_in, group_in)
        rotation_out = Rotation(entries_out, tail_out, permutation_out, group_out)
        with torch.autocast(x.device.type, enabled=False):
            inner = F.linear(rotation_in.apply(x), weight.to(x.dtype))
            result = rotation_out.apply(inner, bias=bias)
        ctx.groups = group_in, group_out
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept = inner if memory_mode == "fast" else None
        ctx.save_for_backward(
            x, kept, weight, entries_in, tail_in, permutation_in, entries_out, tail_out, permutation_out
        )
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, inner, weight, entries_in, tail_in, permutation_in, entries_out, tail_out, permutation_out = (
            ctx.saved_tensors
        )
        rotation_in = Rotation(entries_in, tail_in, permutation_in, ctx.groups[0])
        rotation_out = Rotation(entries_out, tail_out, permutation_out, ctx.groups[1])
        needs_x, _, needs_bias, *needs_rest = ctx.needs_input_grad
        needs_in, needs_out = any(needs_rest[0:2]), any(needs_rest[4:6])
        gradients_in = gradients_out = (None, None)
        x_gradient = None
        with torch.autocast(x.device.type, enabled=False):
            weight = weight.to(x.dtype)
            gradient = gradient.contiguous()
            if needs_out:
                if inner is None:
                    inner = F.linear(rotation_in.apply(x), weight)
                gradients_out = _entries_gradient(rotation_out, inner, gradient)
            if needs_x or needs_in:
                inner_gradient = rotation_out.apply(gradient, transpose=True) @ weight
            if needs_in:
                gradients_in = _entries_gradient(rotation_in, x, inner_gradient)
            if needs_x:
                x_gradient = rotation_in.apply(inner_gradient, transpose=True)
            bias_gradient = gradient.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return x_gradient, None, bias_gradient, *gradients_in, None, None, *gradients_out, None, None, None


def _entries_gradient(rotation: Rotation, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradient of the packed entries of blocks and tail, given the rotation's input and its output's gradient."""
    block = block_size(rotation.entries)
    blocks, tail = rotation_gradient(x, gradient, rotation.permutation, rotation.permutation_group, block)
    entries = cayley_neumann_backward(blocks, rotation.entries)
    return entries, None if rotation.tail is None else cayley_neumann_backward(tail[None], rotation.tail)
