"""Packed skew-symmetric matrices: only the entries above the diagonal are stored and trained."""

import math

import torch
from torch import Tensor


def num_entries(block: int) -> int:
    """Number of free entries of a skew-symmetric matrix of size `block`: ``block (block - 1) / 2``."""
    return block * (block - 1) // 2


def block_size(entries: Tensor) -> int:
    """Size of the matrices whose packed entries are `entries` ``[..., block (block - 1) / 2]``.

    Raises:
        ValueError: if the last dimension is no number of the form ``block (block - 1) / 2`` with ``block >= 2``.
    """
    count = entries.shape[-1]
    block = (1 + math.isqrt(1 + 8 * count)) // 2
    if count == 0 or num_entries(block) != count:
        raise ValueError(
            f"{count} packed entries belong to no skew-symmetric matrix: need block * (block - 1) / 2 >= 1"
        )
    return block


def unpack_skew(entries: Tensor) -> Tensor:
    """Skew-symmetric matrices from packed entries: v at (i, j) and -v at (j, i), i < j, row by row.

    Args:
        entries: ``[..., block (block - 1) / 2]``, floating point.

    Returns:
        ``[..., block, block]`` of the same dtype.

    Example:
        >>> unpack_skew(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[ 0.,  1.,  2.],
                [-1.,  0.,  3.],
                [-2., -3.,  0.]])
    """
    block = block_size(entries)
    rows, columns = torch.triu_indices(block, block, offset=1, device=entries.device)
    skew = entries.new_zeros(*entries.shape[:-1], block, block)
    skew[..., rows, columns] = entries
    skew[..., columns, rows] = -entries
    return skew


def pack_skew_gradient(gradient: Tensor) -> Tensor:
    """Gradient of the packed entries from that of the full matrix: ``gradient[i, j] - gradient[j, i]``, i < j.

    Args:
        gradient: ``[..., block, block]``.

    Returns:
        ``[..., block (block - 1) / 2]`` of the same dtype.
    """
    block = gradient.shape[-1]
    rows, columns = torch.triu_indices(block, block, offset=1, device=gradient.device)
    return gradient[..., rows, columns] - gradient[..., columns, rows]
