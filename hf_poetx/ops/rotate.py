"""Rotation of features by a permuted block-diagonal matrix, by index and by block, and its gradient.

A rotation is given by a permutation p of the columns, blocks for the leading columns of the permuted order and one
smaller block, the tail, for the rest. With P the permutation and D the block-diagonal matrix it is the matrix
``R = P^T D P``: natural order in, natural order out. Neither P nor D is ever built.
"""

from math import gcd

import torch
from torch import Tensor


@torch.library.custom_op("poetx::rotate", mutates_args=(), device_types="cpu")
def rotate(
    x: Tensor,
    blocks: Tensor,
    tail: Tensor | None,
    permutation: Tensor,
    permutation_group: int,
    transpose: bool,
    bias: Tensor | None,
) -> Tensor:
    """Rotate the features of x: ``y[:, p] = x[:, p] @ diag(blocks, tail)``, plus a bias.

    Args:
        x: ``[tokens, width]``.
        blocks: ``[num_blocks, block, block]`` of the dtype of x, for the leading columns in permuted order.
        tail: ``[rest, rest]`` for the remaining columns; None leaves them as they are.
        permutation: ``[width]`` int32.
        permutation_group: columns that the permutation moves together; it tells kernels how wide their loads may be.
        transpose: multiply with the transposed blocks, the inverse rotation if they are orthogonal.
        bias: ``[width]``, added after the rotation, or None.

    Returns:
        ``[tokens, width]`` of the dtype of x; products accumulate in fp32 or wider.

    Source: POET-X, batch-parallel block products and permutation by index.
    """
    with torch.autocast(x.device.type, enabled=False):
        permuted = _permute(x, permutation, permutation_group)
        if bias is not None:
            bias = _permute(bias.to(x.dtype)[None], permutation, permutation_group)[0]
        rotated = _multiply_blocks(permuted, blocks, tail, transpose, bias)
        return _permute(rotated, permutation, permutation_group, inverse=True)


@rotate.register_fake
def _(x, blocks, tail, permutation, permutation_group, transpose, bias) -> Tensor:
    return x.new_empty(x.shape)


@rotate.register_kernel("cuda")
def _(x, blocks, tail, permutation, permutation_group, transpose, bias) -> Tensor:
    if x.dtype == torch.float64:
        return rotate._init_fn(x, blocks, tail, permutation, permutation_group, transpose, bias)
    from ..kernels.rotate import rotate as launch

    return launch(x, blocks, tail, permutation, permutation_group, transpose, bias)


def _permute(x: Tensor, permutation: Tensor, permutation_group: int, inverse: bool = False) -> Tensor:
    """Columns of x in permuted order, or back; whole groups of columns move at once, several times faster than one."""
    group = gcd(x.shape[1], permutation_group)
    order = permutation[::group].long() // group
    order = torch.argsort(order) if inverse else order
    return x.unflatten(1, (-1, group)).index_select(1, order).flatten(1)


def _multiply_blocks(x: Tensor, blocks: Tensor, tail: Tensor | None, transpose: bool, bias: Tensor | None) -> Tensor:
    """``x @ diag(blocks, tail) + bias`` for x ``[tokens, width]`` in permuted order, rounded once."""
    num_blocks, block, _ = blocks.shape
    split = num_blocks * block
    rows = x[:, :split].unflatten(1, (num_blocks, block)).transpose(0, 1)
    matrices = blocks.mT if transpose else blocks
    if bias is None:
        rotated = torch.bmm(rows, matrices)
    else:
        rotated = torch.baddbmm(bias[:split].view(num_blocks, 1, block), rows, matrices)
    rotated = rotated.transpose(0, 1).flatten(1)
    if split == x.shape[1]:
        return rotated
    rest = x[:, split:]
    if tail is None:
        rest = rest if bias is None else rest + bias[split:]
    else:
        tail = tail.mT if transpose else tail
        rest = rest @ tail if bias is None else torch.addmm(bias[split:], rest, tail)
    return torch.cat((rotated, rest), dim=1)


@torch.library.custom_op("poetx::rotation_gradient", mutates_args=(), device_types="cpu")
def rotation_gradient(
    left: Tensor, right: Tensor, permutation: Tensor, permutation_group: int, block: int
) -> tuple[Tensor, Tensor]:
    """Gradient of blocks and tail: ``left[:, p_k]^T @ right[:, p_k]`` for the columns ``p_k`` of each block k.

    Args:
        left: ``[tokens, width]``; the input of the rotation, or the gradient of its output where it was transposed.
        right: ``[tokens, width]``; the other one.
        permutation: ``[width]`` int32.
        permutation_group: columns that the permutation moves together.
        block: size of the blocks; the tail has ``width % block`` columns.

    Returns:
        ``[width // block, block, block]`` and ``[width % block, width % block]``, fp32 (fp64 for fp64 inputs).
    """
    with torch.autocast(left.device.type, enabled=False):
        dtype = torch.float64 if left.dtype == torch.float64 else torch.float32
        left, right = (_permute(t, permutation, permutation_group) for t in (left, right))
        split = left.shape[1] // block * block
        left_blocks, right_blocks = (t[:, :split].unflatten(1, (-1, block)).transpose(0, 1) for t in (left, right))
        blocks = torch.bmm(left_blocks.mT, right_blocks).to(dtype)
        tail = (left[:, split:].mT @ right[:, split:]).to(dtype)
        return blocks, tail


@rotation_gradient.register_fake
def _(left, right, permutation, permutation_group, block) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if left.dtype == torch.float64 else torch.float32
    width = left.shape[1]
    rest = width % block
    return (
        left.new_empty(width // block, block, block, dtype=dtype),
        left.new_empty(rest, rest, dtype=dtype),
    )


@rotation_gradient.register_kernel("cuda")
def _(left, right, permutation, permutation_group, block) -> tuple[Tensor, Tensor]:
    if left.dtype == torch.float64:
        return rotation_gradient._init_fn(left, right, permutation, permutation_group, block)
    from ..kernels.rotate import rotation_gradient as launch

    return launch(left, right, permutation, permutation_group, block)


def _setup_context(ctx, inputs, output) -> None:
    x, blocks, tail, permutation, ctx.permutation_group, ctx.transpose, bias = inputs
    ctx.save_for_backward(x, blocks, tail, permutation)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, gradient: Tensor):
    x, blocks, tail, permutation = ctx.saved_tensors
    x_gradient = blocks_gradient = tail_gradient = bias_gradient = None
    if ctx.needs_input_grad[0]:
        x_gradient = rotate(gradient, blocks, tail, permutation, ctx.permutation_group, not ctx.transpose, None)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        left, right = (gradient, x) if ctx.transpose else (x, gradient)
        blocks_gradient, tail_gradient = rotation_gradient(
            left, right, permutation, ctx.permutation_group, blocks.shape[-1]
        )
        blocks_gradient = blocks_gradient.to(blocks.dtype)
        tail_gradient = None if tail is None else tail_gradient.to(tail.dtype)
    if ctx.needs_input_grad[6]:
        bias_gradient = gradient.sum(0).to(ctx.bias_dtype)
    return x_gradient, blocks_gradient, tail_gradient, None, None, None, bias_gradient


rotate.register_autograd(_backward, setup_context=_setup_context)
