"""Cayley-Neumann transform: packed skew entries to nearly orthogonal blocks, and its gradient."""

import torch
from torch import Tensor

from .skew import block_size, pack_skew_gradient, unpack_skew


@torch.library.custom_op("poetx::cayley_neumann", mutates_args=(), device_types="cpu")
def cayley_neumann(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Map packed skew-symmetric matrices Q to nearly orthogonal blocks.

    Evaluates ``G = I + 2Q + 2Q^2 + 2Q^3 + Q^4 = (I + Q)(I + Q + Q^2 + Q^3)``. If ``s <= 1`` is the largest singular
    value of Q, then ``|G G^T - I| = 2 s^4 - s^8``.

    Args:
        entries: ``[num_blocks, block (block - 1) / 2]``, floating point, row by row above the diagonal.
        dtype: of the result. Products are taken in the wider of fp32 and the dtype of the entries.

    Returns:
        ``[num_blocks, block, block]``.

    Source: POET-X, Cayley-Neumann parameterization cut after the third power.

    Example:
        >>> s = 0.5
        >>> block = cayley_neumann(torch.tensor([[s]], dtype=torch.float64), torch.float64)
        >>> defect = (block @ block.mT - torch.eye(2)).abs().max()
        >>> abs(defect.item() - (2 * s**4 - s**8)) < 1e-12
        True
    """
    with torch.autocast(entries.device.type, enabled=False):
        skew = unpack_skew(entries.to(_accumulation_dtype(entries)))
        square = skew @ skew
        blocks = 2 * (skew + square + square @ skew) + square @ square
        blocks.diagonal(dim1=-2, dim2=-1).add_(1)
        return blocks.to(dtype)


@cayley_neumann.register_fake
def _(entries: Tensor, dtype: torch.dtype) -> Tensor:
    block = block_size(entries)
    return entries.new_empty(entries.shape[0], block, block, dtype=dtype)


@cayley_neumann.register_kernel("cuda")
def _(entries: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.float64 in (entries.dtype, dtype):
        return cayley_neumann._init_fn(entries, dtype)
    from ..kernels.cayley_neumann import cayley_neumann as launch

    return launch(entries, dtype)


@torch.library.custom_op("poetx::cayley_neumann_backward", mutates_args=(), device_types="cpu")
def cayley_neumann_backward(gradient: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the packed entries from that of the blocks.

    With S = Q^2 (symmetric, since Q is skew) and H the gradient of G, the gradient that reaches S is
    ``H_S = 2H - 2HQ + HS + SH`` and that of Q is ``2H + 2SH - H_S Q - Q H_S``.

    Args:
        gradient: ``[num_blocks, block, block]``.
        entries: ``[num_blocks, block (block - 1) / 2]``, as given to `cayley_neumann`.
        dtype: of the blocks. On the GPU 16-bit blocks need no products more precise than TF32.

    Returns:
        Shape and dtype of `entries`.
    """
    with torch.autocast(entries.device.type, enabled=False):
        skew = unpack_skew(entries.to(_accumulation_dtype(entries)))
        gradient = gradient.to(skew.dtype)
        square = skew @ skew
        square_gradient = 2 * (gradient - gradient @ skew) + gradient @ square + square @ gradient
        skew_gradient = 2 * (gradient + square @ gradient) - square_gradient @ skew - skew @ square_gradient
        return pack_skew_gradient(skew_gradient).to(entries.dtype)


@cayley_neumann_backward.register_fake
def _(gradient: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(entries)


@cayley_neumann_backward.register_kernel("cuda")
def _(gradient: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.float64 in (entries.dtype, dtype):
        return cayley_neumann_backward._init_fn(gradient, entries, dtype)
    from ..kernels.cayley_neumann import cayley_neumann_backward as launch

    return launch(gradient, entries, dtype)


def _accumulation_dtype(entries: Tensor) -> torch.dtype:
    return torch.float64 if entries.dtype == torch.float64 else torch.float32


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dtype = inputs[1]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
    (entries,) = ctx.saved_tensors
    return cayley_neumann_backward(gradient, entries, ctx.dtype), None


cayley_neumann.register_autograd(_backward, setup_context=_setup_context)
