"""Merge-then-reinitialise over a whole model, and the one clock that calls it."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from .base_weight import full_tensor
from .checkpoint import poetx_layers
from .layer import LayerMerge
from .model import PoetXModel
from .optimizer import check_holds, check_resettable, reset_optimizer_state, trainable_skew, unwrap_optimizer

logger = logging.getLogger(__name__)

# Above it the polynomial of the forward pass is far from orthogonal, and a merge changes the function visibly.
SIGMA_WARNING = 0.5


@dataclass(frozen=True)
class MergeReport:
    """What one merge did to the layers of a model."""

    layers: list[LayerMerge]

    @property
    def max_sigma(self) -> float:
        """Largest singular value of any skew matrix before the merge."""
        return max((layer.sigma for layer in self.layers), default=0.0)

    @property
    def max_jump(self) -> float:
        """Largest relative change of a weight against what the forward pass used, about sigma^4."""
        return max((layer.jump for layer in self.layers), default=0.0)


def find_tuner(model: nn.Module) -> PoetXModel | None:
    """The POET-X tuner inside a model and its wrappers, or None."""
    return next((module for module in model.modules() if isinstance(module, PoetXModel)), None)


def require_tuner(model: nn.Module) -> PoetXModel:
    """`find_tuner`, or ValueError."""
    tuner = find_tuner(model)
    if tuner is None:
        raise ValueError(f"{type(model).__name__} has no POET-X adapter; wrap it with get_poetx_model first")
    return tuner


def merge_interval(tuner: PoetXModel) -> int:
    """Optimizer steps between merges of the adapter in training; 0 if it never merges.

    Raises:
        ValueError: if more than one adapter leans on the weights that the merges would change.
    """
    intervals = {name: tuner.peft_config[name].merge_interval for name in tuner.active_adapters}
    interval = max(intervals.values(), default=0)
    if interval and len(tuner.peft_config) > 1:
        raise ValueError(
            f"periodic merges (merge_interval={interval}) change the base weights under the other adapters "
            f"{sorted(set(tuner.peft_config) - set(intervals))}; use PoetXConfig(merge_interval=0) for several adapters"
        )
    return interval


def merge_then_reinitialize(model: nn.Module, optimizer: Any | None = None) -> MergeReport:
    """Merge the active adapter's exactly orthogonal transforms into the base weights and start it over.

    Afterwards the skew entries are zero, under new permutations, and the optimizer's state of exactly these parameters
    is that of a first step. The function changes by the jump in the report. Deterministic on every rank without
    communication, but for sharded weights, which are gathered layer by layer.

    Args:
        model: from `get_poetx_model`, also inside wrappers.
        optimizer: whose state to reset; None where there is none.

    Raises:
        ValueError: if a skew entry is not finite, or a weight cannot be written (it is quantized, offloaded, or merged
            by `merge_adapter`), naming the layer; if the model has other adapters; if trained skew entries are not in
            the optimizer. Nothing is changed then.
    """
    tuner = require_tuner(model)
    if len(tuner.peft_config) > 1:
        raise ValueError(
            f"the merge changes the base weights under all adapters of this model, {sorted(tuner.peft_config)}; delete the "
            "others, or train each on a base model of its own"
        )
    pairs = [
        (layer, name)
        for _, layer in poetx_layers(tuner)
        for name in tuner.active_adapters
        if name in layer.poetx_config
    ]
    for layer, name in pairs:
        layer.check_reinitializable(name)
    skew = [p for layer, name in pairs for p in layer.skew_parameters(name)]
    if optimizer is not None:
        check_resettable(optimizer)
        check_holds(optimizer, skew)
    report = MergeReport([layer.merge_then_reinitialize(name) for layer, name in pairs])
    if optimizer is not None:
        reset_optimizer_state(optimizer, skew)
    logger.info("merged: largest sigma(Q) %.3g, largest jump %.3g", report.max_sigma, report.max_jump)
    large = [layer for layer in report.layers if layer.sigma > SIGMA_WARNING]
    if large:
        worst = max(large, key=lambda layer: layer.sigma)
        warnings.warn(
            f"sigma(Q) above {SIGMA_WARNING} in {len(large)} layers, the largest {worst.sigma:.2f} in {worst.name!r}: the "
            f"merge changed its weight by {worst.jump:.1%}; lower the learning rate, poet_scale or merge_interval",
            stacklevel=2,
        )
    return report


def claim_clock(model: nn.Module, clock: str) -> PoetXModel:
    """Make "Trainer", "attach_merging" or "merge_step" the one clock that merges a model, and return its tuner.

    The first two hold a model until they release it (``tuner.clock = None``); nothing says when a loop of `merge_step`
    ends, so the others may follow it.

    Raises:
        ValueError: if another clock holds the model, if several adapters lean on weights that merges would change, or
            if the model is wrapped by what flattens its parameters.
    """
    tuner = require_tuner(model)
    if tuner.clock not in (None, "merge_step"):
        raise ValueError(
            f"{tuner.clock} merges this model already; {clock} would be a second clock, use one of them (what "
            "attach_merging returned has a method remove())"
        )
    if merge_interval(tuner) and tuner.clock is None:
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel) or type(module).__module__.startswith("deepspeed."):
                raise ValueError(
                    f"{type(module).__name__} flattens parameters, so nothing can be merged: shard with fully_shard "
                    "(FSDP2), or use PoetXConfig(merge_interval=0)"
                )
    tuner.clock = clock
    return tuner


def merge_step(model: nn.Module, optimizer: Any) -> MergeReport | None:
    """Count one optimizer step and merge if it is time; call it after ``optimizer.step()`` in a hand-written loop.

    The counter is part of the adapter's checkpoint. Under accelerate, calls between accumulated gradients and calls
    after a step that a gradient scaler skipped do not count.

    Returns:
        The report of the merge, or None on the steps between.

    Raises:
        ValueError: see `claim_clock` and `merge_then_reinitialize`.
        TypeError: for an optimizer whose state cannot be reset, at the first step.
    """
    tuner = require_tuner(model)
    first = tuner.clock is None
    claim_clock(model, "merge_step")
    if first and merge_interval(tuner):
        check_resettable(optimizer)
    gradient_state = getattr(optimizer, "gradient_state", None)
    if gradient_state is not None and not gradient_state.sync_gradients:
        return None
    if getattr(optimizer, "step_was_skipped", False):
        return None
    return _count_step(tuner, optimizer)


class MergingHandle:
    """Ends the merging that `attach_merging` began, and leaves the model to another clock."""

    def __init__(self, tuner: PoetXModel, hook: Any) -> None:
        self._tuner, self._hook = tuner, hook

    def remove(self) -> None:
        """Do it; a second call does nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook, self._tuner.clock = None, None


def attach_merging(model: nn.Module, optimizer: Any) -> MergingHandle:
    """Merge periodically from inside ``optimizer.step()``, for hand-written loops; call it once.

    The counter is part of the adapter's checkpoint. Steps that a gradient scaler skips do not count.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        ValueError: see `claim_clock`.
        TypeError: for an optimizer whose state cannot be reset.
    """
    if merge_interval(require_tuner(model)):
        check_resettable(optimizer)
    tuner = claim_clock(model, "attach_merging")

    def after_step(inner: Optimizer, args: tuple, kwargs: dict) -> None:
        if not _is_state_initialisation(tuner, inner):
            _count_step(tuner, inner)

    return MergingHandle(tuner, unwrap_optimizer(optimizer).register_step_post_hook(after_step))


def _count_step(tuner: PoetXModel, optimizer: Any) -> MergeReport | None:
    interval = merge_interval(tuner)
    name = tuner.active_adapters[0]
    tuner.poetx_step[name].add_(1)
    if interval and int(tuner.poetx_step[name]) % interval == 0:
        return merge_then_reinitialize(tuner, optimizer)
    return None


def _is_state_initialisation(tuner: PoetXModel, optimizer: Optimizer) -> bool:
    """Whether this is no training step but torch's distributed checkpoint filling an empty optimizer's state.

    It steps once with a learning rate of zero and gradients of zero.
    """
    if any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    gradients = (full_tensor(p.grad) for p in trainable_skew(tuner) if p.grad is not None)
    return not any(torch.count_nonzero(gradient) for gradient in gradients)
