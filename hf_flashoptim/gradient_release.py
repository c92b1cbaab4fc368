"""Gradient release: step each parameter during the backward pass, as soon as its gradient is there, and free it.

Peak memory then holds a few gradients instead of all. The steps are the optimizer's own, bit for bit. What needs all
gradients at once cannot work: gradient accumulation, clipping by the global norm, GradScaler, and wrappers that keep
gradients in buffers (DistributedDataParallel, FSDP1).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_flashoptim.optimizer import FlashOptimizer

CLIP_MODES = ("parameter", "previous_step")


class Clipping:
    """Clipping that needs no global norm of the gradients at hand.

    Args:
        max_norm: norms above it are scaled down to it.
        mode: ``"parameter"``: each parameter's gradient by its own norm. ``"previous_step"``: all gradients by the
            global norm of the step before (the first step: by their own), which follows global clipping one step late.
    """

    def __init__(self, max_norm: float, mode: str) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_grad_norm={max_norm!r} is not valid; it must be above 0.")
        if mode not in CLIP_MODES:
            raise ValueError(f"clip={mode!r} is not valid; choose one of {CLIP_MODES}.")
        self._max_norm = max_norm
        self._by_previous = mode == "previous_step"
        self._coefficient: Tensor | None = None
        self._squares: list[Tensor] = []

    def clip_(self, grad: Tensor) -> None:
        """Scale a gradient in place, without a host sync."""
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        coefficient = self._coefficient
        if self._by_previous:
            self._squares.append(norm.square())
        if coefficient is None:
            coefficient = self._scale(norm)
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(coefficient.to(local.device))

    def finish_step(self) -> None:
        """The global norm of this step becomes the one to clip by."""
        if self._squares:
            squares = torch.stack([s.to(self._squares[0].device) for s in self._squares])
            self._coefficient = self._scale(squares.sum().sqrt())
            self._squares.clear()

    def _scale(self, norm: Tensor) -> Tensor:
        # A non-finite norm must not reach other parameters, nor the next step.
        return torch.where(norm.isfinite(), (self._max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


class GradientReleaseHandle:
    """Holds the hooks of ``enable_gradient_release``."""

    def __init__(self, optimizer: FlashOptimizer, clipping: Clipping | None) -> None:
        self._optimizer = optimizer
        self._clipping = clipping
        self._released: set[int] = set()
        self._user_steps = False
        self._hooks: list[RemovableHandle] = [optimizer.register_step_post_hook(self._on_step)]

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Remove the hooks: ``optimizer.step()`` steps all parameters again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizer.gradient_release = None

    def _on_step(self, *_: object) -> None:
        self._user_steps = True
        self._released.clear()
        if self._clipping is not None:
            self._clipping.finish_step()

    def _release(self, p: Tensor, group_index: int, pre_step: Callable[[Tensor, dict[str, Any]], bool] | None) -> None:
        if p.grad is None:
            return
        if self._user_steps and id(p) in self._released:
            raise RuntimeError(
                f"A parameter of shape {tuple(p.shape)} got a second gradient before optimizer.step(). Gradient "
                "release steps at every gradient, so it cannot accumulate: use one backward pass a step, and "
                "gradient checkpointing with use_reentrant=False."
            )
        self._released.add(id(p))
        # Looked up now: load_state_dict and schedulers replace groups and what is in them.
        group = self._optimizer.param_groups[group_index]
        if pre_step is None or pre_step(p, group):
            if self._clipping is not None:
                self._clipping.clip_(p.grad)
            self._optimizer.step_param(p, group)
        p.grad = None


def enable_gradient_release(
    model: nn.Module,
    optimizer: FlashOptimizer,
    *,
    grad_scaler: object | None = None,
    pre_step: Callable[[Tensor, dict[str, Any]], bool] | None = None,
    max_grad_norm: float | None = None,
    clip: str = "parameter",
) -> GradientReleaseHandle:
    """Step every parameter of the model during the backward pass and free its gradient.

    Go on calling ``optimizer.step()`` and ``optimizer.zero_grad()``: they find nothing left to do for these parameters
    (others of the optimizer are stepped as ever) and mark where a step ends.

    Args:
        model: its trainable parameters that belong to the optimizer are released. FSDP2 (``fully_shard``) works.
        optimizer: a FlashOptimizer, or a wrapper that has it as ``.optimizer`` (accelerate).
        grad_scaler: must be None.
        pre_step: called with parameter and group before each step; False drops this gradient.
        max_grad_norm: clip gradients to this norm, in one of the ways that need no global norm.
        clip: ``"parameter"`` or ``"previous_step"``, see ``Clipping``.

    Returns:
        A handle whose ``remove()`` undoes this.

    Raises:
        TypeError: for a model in DistributedDataParallel or FSDP1, or an optimizer of another kind.
        NotImplementedError: for a GradScaler.
        ValueError: if release is already on, or for a clipping option that is not valid.
        RuntimeError: (in a later backward pass) if a parameter gets two gradients in one step.
    """
    while not isinstance(optimizer, FlashOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    _refuse(model, optimizer, grad_scaler)
    clipping = None if max_grad_norm is None else Clipping(max_grad_norm, clip)
    handle = GradientReleaseHandle(optimizer, clipping)
    reference = weakref.ref(handle)
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for p in model.parameters():
        if p.requires_grad and id(p) in group_of:
            handle._hooks.append(p.register_post_accumulate_grad_hook(_hook(reference, group_of[id(p)], pre_step)))
    optimizer.gradient_release = handle
    return handle


def _hook(
    reference: "weakref.ref[GradientReleaseHandle]",
    group_index: int,
    pre_step: Callable[[Tensor, dict[str, Any]], bool] | None,
) -> Callable[[Tensor], None]:
    def release(p: Tensor) -> None:
        handle = reference()
        if handle is not None:
            handle._release(p, group_index, pre_step)

    return release


def _refuse(model: nn.Module, optimizer: FlashOptimizer, grad_scaler: object | None) -> None:
    if not isinstance(optimizer, FlashOptimizer):
        raise TypeError(f"Gradient release needs a FlashOptimizer; got {type(optimizer).__name__}.")
    if grad_scaler is not None:
        raise NotImplementedError(
            "Gradient release cannot work with a GradScaler, which unscales all gradients after the backward pass. "
            "Train in bf16, which needs none."
        )
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import, and rarely used

    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
            raise TypeError(
                f"Gradient release cannot work with {type(module).__name__}, which keeps gradients in buffers of its "
                "own. Use FSDP2 (torch.distributed.fsdp.fully_shard), or train without gradient release."
            )
    if optimizer.gradient_release is not None:
        raise ValueError("Gradient release is already on for this optimizer; call remove() on its handle first.")
