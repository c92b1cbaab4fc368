"""One trained rotation, as operations take it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .cayley_neumann import cayley_neumann, cayley_neumann_backward
from .rotate import rotate, rotation_gradient
from .skew import block_size


class Rotation(NamedTuple):
    """Packed skew entries of blocks and tail, and the permutation they act under.

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

    def entries_gradient(self, x: Tensor, gradient: Tensor) -> list[Tensor]:
        """Gradient of the packed entries, and of the tail if there is one, from input and output's gradient."""
        block = block_size(self.entries)
        blocks, tail = rotation_gradient(x, gradient, self.permutation, self.permutation_group, block)
        gradients = [cayley_neumann_backward(blocks, self.entries, x.dtype)]
        if self.tail is not None:
            gradients.append(cayley_neumann_backward(tail[None], self.tail, x.dtype))
        return gradients


# Two rotations in the signature of an operation, input side first.
_ROTATION = "Tensor entries_{0}, Tensor? tail_{0}, Tensor permutation_{0}, int group_{0}"
ROTATIONS = f"{_ROTATION.format('in')}, {_ROTATION.format('out')}"
