"""Both rotations of a frozen linear layer folded into its weight, and the gradient of that.

    W_eff[p_out][:, p_in] = G_out^T W[p_out][:, p_in] G_in^T

A layer that rotates its activations passes over each of them three times. Folding passes over the weight instead, in
both directions, but makes the plain layer's third product necessary, the gradient of its weight. So folding is faster
with many tokens and narrow layers, and rotating otherwise.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import is_watched, without_autocast
from .rotation import ROTATIONS, Rotation


class _Costs(NamedTuple):
    """What decides between the two ways on a device.

    `folded_passes` over the weight take as long as folding does, and `passes_again` more where it is folded again in the
    backward pass. A pass takes for each element as long as the block's multiplications, or where memory is the bound as
    long as `least_pass` multiplications of a large product. Below `least_tokens` either way is bound by launches.
    """

    folded_passes: int
    passes_again: int
    least_pass: int
    least_tokens: int


_ROTATED_PASSES = 3.5
_CPU = _Costs(folded_passes=8, passes_again=3, least_pass=0, least_tokens=0)
# Fitted to measurements on an H200 (benchmarks/bench_fold.py), but for `passes_again`, which is by counting.
_GPU = _Costs(folded_passes=12, passes_again=4, least_pass=550, least_tokens=8192)


def folding_pays(
    tokens: int, in_features: int, out_features: int, block: int, device_type: str, memory_mode: str = "fast"
) -> bool:
    """Whether a training step of a layer is faster with the folded weight than with rotated activations.

    The folded weight then also takes no more memory than the product with the weight that rotating keeps.

    Args:
        tokens: rows of the activations.
        in_features: of the layer.
        out_features: of the layer.
        block: the larger block size of its rotations.
        device_type: where the layer is, "cpu" or "cuda".
        memory_mode: "fast" or "mem", which folds, or rotates and multiplies, again in the backward pass.
    """
    costs = _CPU if device_type == "cpu" else _GPU
    one_pass = max(block, costs.least_pass)
    # In multiplications, without the two products that both ways have in common.
    rotated = _ROTATED_PASSES * one_pass * tokens * (in_features + out_features)
    folded = (costs.folded_passes * one_pass + tokens) * in_features * out_features
    if memory_mode == "mem":
        rotated += (one_pass + out_features) * tokens * in_features
        folded += costs.passes_again * one_pass * in_features * out_features
    return folded < rotated and tokens >= max(in_features, costs.least_tokens)


def fold(weight: Tensor, *rotations) -> Tensor:
    """The weight of the plain linear layer that equals the frozen one between its rotations.

    Args:
        weight: ``[out_features, in_features]``, natural order; its dtype is that of the products.
        rotations: the fields of the input side's `Rotation`, then those of the output side's.

    Returns:
        ``[out_features, in_features]`` of the dtype of the weight; autograd does not track it.

    Source: POET, the transformed weight, with the blocks and permutations of POET-X.
    """
    return _fold(weight, *rotations) if is_watched(weight) else _fold_on_cuda(weight, *rotations)


def fold_backward(gradient: Tensor, weight: Tensor, *rotations_and_needs) -> list[Tensor]:
    """Gradients of the packed entries and the tail of those rotations that need them, from that of the folded weight.

    Args:
        gradient: ``[out_features, in_features]``, of the folded weight.
        weight: as in `fold`.
        rotations_and_needs: as in `fold`, and whether the input and the output side need their gradients.
    """
    backward = _fold_backward if is_watched(weight) else _fold_backward_on_cuda
    return backward(gradient, weight, *rotations_and_needs)


torch.library.define("poetx::fold", f"(Tensor weight, {ROTATIONS}) -> Tensor")
torch.library.define(
    "poetx::fold_backward", f"(Tensor gradient, Tensor weight, {ROTATIONS}, bool[] needs) -> Tensor[]"
)
_fold = torch.ops.poetx.fold.default
_fold_backward = torch.ops.poetx.fold_backward.default


def _fold_on_cpu(weight: Tensor, *rotations) -> Tensor:
    rotation_in, rotation_out = Rotation(*rotations[:4]), Rotation(*rotations[4:])
    with without_autocast(weight.device.type):
        rows = rotation_in.apply(weight, transpose=True)
        return rotation_out.apply(rows.mT).mT.contiguous()


def _fold_backward_on_cpu(gradient: Tensor, weight: Tensor, *rotations_and_needs) -> list[Tensor]:
    *rotations, (needs_in, needs_out) = rotations_and_needs
    rotation_in, rotation_out = Rotation(*rotations[:4]), Rotation(*rotations[4:])
    results = []
    with without_autocast(weight.device.type):
        if needs_in:
            rows_gradient = rotation_out.apply(gradient.mT, transpose=True).mT
            # Of a transposed rotation: its input stands on the right.
            results += rotation_in.entries_gradient(rows_gradient, weight)
        if needs_out:
            results += rotation_out.entries_gradient(rotation_in.apply(weight, transpose=True).mT, gradient.mT)
    return results


def _fold_on_cuda(weight: Tensor, *rotations) -> Tensor:
    if weight.dtype == torch.float64:
        return _fold_on_cpu(weight, *rotations)
    with without_autocast("cuda"):
        return _kernels().forward(weight, *rotations)


def _fold_backward_on_cuda(gradient: Tensor, *arguments) -> list[Tensor]:
    if gradient.dtype == torch.float64:
        return _fold_backward_on_cpu(gradient, *arguments)
    with without_autocast("cuda"):
        return _kernels().backward(gradient, *arguments)


@functools.cache
def _kernels() -> ModuleType:
    """The GPU implementation, imported at its first use: an installation for the CPU needs no Triton."""
    from ..kernels import fold

    return fold


torch.library.impl("poetx::fold", "cpu", _fold_on_cpu)
torch.library.impl("poetx::fold", "cuda", _fold_on_cuda)
torch.library.impl("poetx::fold_backward", "cpu", _fold_backward_on_cpu)
torch.library.impl("poetx::fold_backward", "cuda", _fold_backward_on_cuda)


@torch.library.register_fake("poetx::fold")
def _(weight: Tensor, *rotations) -> Tensor:
    return weight.new_empty(weight.shape)


@torch.library.register_fake("poetx::fold_backward")
def _(gradient: Tensor, weight: Tensor, *rotations_and_needs) -> list[Tensor]:
    entries_in, tail_in, _, _, entries_out, tail_out, _, _, (needs_in, needs_out) = rotations_and_needs
    shaped_like = [t for t in (entries_in, tail_in) if needs_in and t is not None]
    shaped_like += [t for t in (entries_out, tail_out) if needs_out and t is not None]
    return [torch.empty_like(t) for t in shaped_like]
