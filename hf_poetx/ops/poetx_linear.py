"""The POET-X linear layer: a frozen weight between two trained rotations, with two activation memory modes.

    a = R_in(x);  b = a W^T;  y = R_out(b) + bias

Input-centric: activations are rotated, not the weight, unless folding the rotations into it is faster (`fold`). The dense
blocks are rebuilt from the packed skew entries in the backward pass instead of being kept.
"""

import functools
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import is_watched, without_autocast
from .fold import fold, fold_backward
from .rotation import ROTATIONS, Rotation


def poetx_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation_in: Rotation,
    rotation_out: Rotation,
    memory_mode: str,
    folded: bool = False,
) -> Tensor:
    """Apply a frozen linear layer between two rotations.

    Args:
        x: ``[..., in_features]``, floating point; it sets the dtype of the products.
        weight: ``[out_features, in_features]``, natural order; gets no gradient.
        bias: ``[out_features]`` or None, added outside the rotations.
        rotation_in: of the input features.
        rotation_out: of the output features.
        memory_mode: "fast" saves x and b, or the folded weight, for the backward pass; "mem" saves x alone and computes
            the other again.
        folded: rotate the weight, and pass x through a plain layer with the result, in place of rotating x and b.

    Returns:
        ``[..., out_features]`` of the dtype of x.

    Source: POET-X, input-centric forward pass and activation checkpointing; POET, the transformed weight.
    """
    return _PoetXLinear.apply(x, weight, bias, *rotation_in, *rotation_out, memory_mode, folded)


class _PoetXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *rotations_and_way):
        *rotations, memory_mode, ctx.folded = rotations_and_way
        entries_in, tail_in, permutation_in, group_in, entries_out, tail_out, permutation_out, group_out = rotations
        linear = _folded_linear if ctx.folded else _linear if is_watched(x) else _linear_on_cuda
        result, kept = linear(x.reshape(-1, x.shape[-1]), weight, bias, *rotations)
        ctx.groups = group_in, group_out
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(
            x, kept if memory_mode == "fast" else None, weight,
            entries_in, tail_in, permutation_in, entries_out, tail_out, permutation_out,
        )  # fmt: skip
        # A tracked view could not be changed in place by the user.
        return (
            result if x.dim() == 2 else torch.ops.aten._unsafe_view.default(result, (*x.shape[:-1], result.shape[1]))
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, *saved, entries_in, tail_in, permutation_in, entries_out, tail_out, permutation_out = ctx.saved_tensors
        needs_x, _, needs_bias, *needs_rest = ctx.needs_input_grad
        needs_in, needs_out = any(needs_rest[0:2]), any(needs_rest[4:6])
        if ctx.folded:
            linear_backward = _folded_linear_backward
        else:
            linear_backward = _linear_backward if is_watched(x) else _linear_backward_on_cuda
        found = iter(
            linear_backward(
                gradient.reshape(-1, gradient.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1]), *saved,
                entries_in, tail_in, permutation_in, ctx.groups[0],
                entries_out, tail_out, permutation_out, ctx.groups[1],
                [needs_x, needs_bias, needs_in, needs_out],
            )
        )  # fmt: skip
        x_gradient = next(found).view(x.shape) if needs_x else None
        bias_gradient = next(found).to(ctx.bias_dtype) if needs_bias else None
        entries_in_gradient = next(found) if needs_in else None
        tail_in_gradient = next(found) if needs_in and tail_in is not None else None
        entries_out_gradient = next(found) if needs_out else None
        tail_out_gradient = next(found) if needs_out and tail_out is not None else None
        return (
            x_gradient, None, bias_gradient,
            entries_in_gradient, tail_in_gradient, None, None,
            entries_out_gradient, tail_out_gradient, None, None, None, None,
        )  # fmt: skip


# One operation a direction, and registered without `custom_op`, whose wrapper costs three times as much per call: a
# small layer on a GPU is bound by the work of the host.
torch.library.define(
    "poetx::linear",
    f"(Tensor x, Tensor weight, Tensor? bias, {ROTATIONS}) -> (Tensor, Tensor)",
)
torch.library.define(
    "poetx::linear_backward",
    f"(Tensor gradient, Tensor x, Tensor? kept, Tensor weight, {ROTATIONS}, bool[] needs) -> Tensor[]",
)
_linear = torch.ops.poetx.linear.default
_linear_backward = torch.ops.poetx.linear_backward.default


def _linear_on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, *rotations) -> tuple[Tensor, Tensor]:
    """Result ``[tokens, out_features]``, and b as a flat tensor, laid out as the implementation likes."""
    rotation_in, rotation_out = Rotation(*rotations[:4]), Rotation(*rotations[4:])
    with without_autocast(x.device.type):
        inner = F.linear(rotation_in.apply(x), weight.to(x.dtype))
        return rotation_out.apply(inner, bias=bias), inner.flatten()


def _linear_backward_on_cpu(
    gradient: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor, *rotations_and_needs
) -> list[Tensor]:
    """Those of the gradients of x, the bias, the entries of each rotation and their tails that are needed."""
    *rotations, (needs_x, needs_bias, needs_in, needs_out) = rotations_and_needs
    rotation_in, rotation_out = Rotation(*rotations[:4]), Rotation(*rotations[4:])
    with without_autocast(x.device.type):
        weight = weight.to(x.dtype)
        inner_gradient = rotation_out.apply(gradient, transpose=True) @ weight
        results = [rotation_in.apply(inner_gradient, transpose=True)] if needs_x else []
        if needs_bias:
            results.append(gradient.sum(0))
        if needs_in:
            results += rotation_in.entries_gradient(x, inner_gradient)
        if needs_out:
            inner = F.linear(rotation_in.apply(x), weight) if kept is None else kept.view(gradient.shape)
            results += rotation_out.entries_gradient(inner, gradient)
        return results


def _folded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rotations) -> tuple[Tensor, Tensor]:
    """Result ``[tokens, out_features]`` and the folded weight."""
    folded = fold(weight.to(x.dtype), *rotations)
    with without_autocast(x.device.type):
        return F.linear(x, folded, None if bias is None else bias.to(x.dtype)), folded


def _folded_linear_backward(
    gradient: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor, *rotations_and_needs
) -> list[Tensor]:
    """As `_linear_backward_on_cpu`."""
    *rotations, (needs_x, needs_bias, needs_in, needs_out) = rotations_and_needs
    weight, results = weight.to(x.dtype), []
    with without_autocast(x.device.type):
        if needs_x:
            results.append(gradient @ (fold(weight, *rotations) if kept is None else kept))
        if needs_bias:
            results.append(gradient.sum(0))
        if needs_in or needs_out:
            results += fold_backward(gradient.mT @ x, weight, *rotations, [needs_in, needs_out])
        return results


def _linear_on_cuda(x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return _linear_on_cpu(x, *arguments)
    with without_autocast("cuda"):
        return _kernels().forward(x, *arguments)


def _linear_backward_on_cuda(gradient: Tensor, *arguments) -> list[Tensor]:
    if gradient.dtype == torch.float64:
        return _linear_backward_on_cpu(gradient, *arguments)
    with without_autocast("cuda"):
        return _kernels().backward(gradient, *arguments)


@functools.cache
def _kernels() -> ModuleType:
    """The GPU implementation, imported at its first use: an installation for the CPU needs no Triton."""
    from ..kernels import poetx_linear

    return poetx_linear


torch.library.impl("poetx::linear", "cpu", _linear_on_cpu)
torch.library.impl("poetx::linear", "cuda", _linear_on_cuda)
torch.library.impl("poetx::linear_backward", "cpu", _linear_backward_on_cpu)
torch.library.impl("poetx::linear_backward", "cuda", _linear_backward_on_cuda)


@torch.library.register_fake("poetx::linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *rotations) -> tuple[Tensor, Tensor]:
    tokens, out_features = x.shape[0], weight.shape[0]
    return x.new_empty(tokens, out_features), x.new_empty(tokens * out_features)


@torch.library.register_fake("poetx::linear_backward")
def _(gradient: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor, *rotations_and_needs) -> list[Tensor]:
    entries_in, tail_in, _, _, entries_out, tail_out, _, _, needs = rotations_and_needs
    needs_x, needs_bias, needs_in, needs_out = needs
    shaped_like = [x] if needs_x else []
    if needs_bias:
        shaped_like.append(gradient[0])
    shaped_like += [t for t in (entries_in, tail_in) if needs_in and t is not None]
    shaped_like += [t for t in (entries_out, tail_out) if needs_out and t is not None]
    return [torch.empty_like(t) for t in shaped_like]
