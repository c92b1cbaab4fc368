"""How a tensor is cut into groups of 32 that share one scale, and into chunks that bound temporary memory.

Groups run along the last dimension. Where it is shorter than a group, trailing dimensions are flattened until they
fill one; the first dimension is never flattened, so a tensor sharded on it keeps its groups. The last group of a row
may be short. All ops of this package see a quantized tensor as ``[rows, cols]`` with scales ``[rows, groups]``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP_SIZE = 32
# Elements that an op on the CPU works on at once: its dozen fp32 temporaries take 12 MiB.
CHUNK_SIZE = 1 << 18


class Chunk(NamedTuple):
    """Index ranges of one piece of a ``[rows, cols]`` tensor; ``groups`` indexes the columns of its scales."""

    rows: slice
    cols: slice
    groups: slice


def group_dim(shape: Sequence[int]) -> int:
    """First of the trailing dimensions that groups run along: 1 <= it < len(shape), for two or more dimensions.

    Example:
        >>> group_dim((64, 128)), group_dim((64, 64, 3, 3)), group_dim((64, 3, 3, 3)), group_dim((8, 64, 128))
        (1, 1, 1, 2)
    """
    dim, cols = len(shape) - 1, shape[-1]
    while dim > 1 and cols < GROUP_SIZE:
        dim -= 1
        cols *= shape[dim]
    return dim


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of a tensor of this shape: its leading dimensions, then one entry a group.

    Example:
        >>> scale_shape((64, 100)), scale_shape((64, 64, 3, 3)), scale_shape((8, 64, 128))
        ((64, 4), (64, 18), (8, 64, 4))
    """
    dim = group_dim(shape)
    cols = torch.Size(shape[dim:]).numel()
    return (*shape[:dim], -(-cols // GROUP_SIZE))


def rows_and_cols(shape: Sequence[int]) -> tuple[int, int]:
    """The two-dimensional view ``[rows, cols]`` that keeps groups apart, with as many rows as possible.

    Rows of whole groups become rows of one group each, so that chunks of them are contiguous.
    """
    dim = group_dim(shape)
    rows, cols = torch.Size(shape[:dim]).numel(), torch.Size(shape[dim:]).numel()
    return (rows * cols // GROUP_SIZE, GROUP_SIZE) if cols % GROUP_SIZE == 0 else (rows, cols)


def chunks(rows: int, cols: int) -> Iterator[Chunk]:
    """Cover ``[rows, cols]`` with pieces of at most ``CHUNK_SIZE`` elements that cut no group."""
    width = min(cols, CHUNK_SIZE)
    height = max(1, CHUNK_SIZE // max(width, 1))
    for row in range(0, rows, height):
        for col in range(0, cols, width):
            end = min(col + width, cols)
            yield Chunk(
                slice(row, min(row + height, rows)),
                slice(col, end),
                slice(col // GROUP_SIZE, -(-end // GROUP_SIZE)),
            )


def to_groups(values: Tensor) -> Tensor:
    """View ``[rows, cols]`` as ``[rows, groups, 32]``; a short last group is padded with zeros (and copied)."""
    rows, cols = values.shape
    if missing := -cols % GROUP_SIZE:
        values = functional.pad(values, (0, missing))
    return values.reshape(rows, values.shape[1] // GROUP_SIZE, GROUP_SIZE)


def from_groups(groups: Tensor, cols: int) -> Tensor:
    """Inverse of ``to_groups``: ``[rows, groups, 32]`` back to ``[rows, cols]``."""
    return groups.flatten(1)[:, :cols]
