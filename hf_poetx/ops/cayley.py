"""The exact Cayley transform, for merges that must keep the spectrum."""

import torch
from torch import Tensor

from .skew import unpack_skew


def cayley(entries: Tensor) -> Tensor:
    """Exactly orthogonal blocks ``C(Q) = (I + Q)(I - Q)^-1`` from packed skew entries.

    It has the sign of `cayley_neumann`, which is its series cut after the third power.

    Args:
        entries: ``[num_blocks, block (block - 1) / 2]``; solved in fp32, or fp64 if given so.

    Returns:
        ``[num_blocks, block, block]`` in the dtype of the solution.

    Source: POET-X, Cayley parameterization.
    """
    dtype = torch.float64 if entries.dtype == torch.float64 else torch.float32
    skew = unpack_skew(entries.to(dtype))
    identity = torch.eye(skew.shape[-1], dtype=dtype, device=skew.device)
    # (I - Q)^-1 and (I + Q) commute, so one solve gives the quotient.
    return torch.linalg.solve(identity - skew, identity + skew)


def largest_singular_value(entries: Tensor, iterations: int = 30) -> Tensor:
    """Largest singular value of each skew-symmetric Q, by power iteration on ``Q^T Q`` from a fixed start.

    Args:
        entries: ``[num_blocks, block (block - 1) / 2]``.
        iterations: products with ``Q^T Q``; 30 give it to a few percent for random Q, enough for a warning.

    Returns:
        ``[num_blocks]`` fp32; NaN where an entry is NaN.
    """
    skew = unpack_skew(entries.float())
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(skew.shape[-1], 1, generator=generator).to(skew.device)
    vector = start.expand(skew.shape[0], -1, -1)
    tiny = torch.finfo(torch.float32).tiny
    with torch.autocast(skew.device.type, enabled=False):
        for _ in range(iterations):
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(tiny)
            vector = skew.mT @ (skew @ vector)
    # |Q^T Q v| for a unit v approaches the square of the largest singular value from below.
    return vector.norm(dim=1).squeeze(-1).sqrt()
