"""Gradient release: step parameters during the backward pass, soon after their gradients are there, and free these.

A call of the optimizer takes the host about 0.1 ms, in which a GPU steps 30 million elements. So gradients wait until
there are ``gradient_bytes_to_hold`` of them, which one call then steps, and the rest are stepped as the backward pass
ends. Peak memory holds these and the gradient that has just been computed instead of all (with FSDP2, whose gradients
are views of one buffer a layer, the buffers of these). The steps are the optimizer's own, bit for bit.

What needs all gradients at once cannot work: gradient accumulation, clipping by the global norm, GradScaler, and
wrappers that keep gradients in buffers (DistributedDataParallel, FSDP1).
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hf_flashoptim.optimizer import FlashOptimizer
from hf_flashoptim.sharding import local_part

CLIP_MODES = ("parameter", "previous_step")
# What a GPU steps while the host makes the next call; more would save no time.
ENOUGH_BYTES = 1 << 26
# A small model's gradients are less than that; a sixteenth of them makes 16 calls a backward pass and adds an eighth of
# a byte a bf16 parameter.
SMALL_MODEL_SHARE = 1 / 16


def gradient_bytes_to_hold(params: Iterable[Tensor]) -> int:
    """How many bytes of gradients wait at most: 64 MiB or a sixteenth of the gradients of all these parameters.

    Args:
        params: parameters; of sharded ones, this rank's parts count.
    """
    total = sum(local_part(p).nbytes for p in params)
    return min(ENOUGH_BYTES, int(total * SMALL_MODEL_SHARE))


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


class Bucket:
    """Parameters that wait to be stepped together: those of one backward pass whose gradients are on one stream.

    Args:
        stream: of CUDA, or None.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._params: dict[int, list[Tensor]] = {}  # by the index of their group
        self._grads: dict[int, Tensor] = {}  # by their parameter's id
        self.nbytes = 0

    def add(self, p: Tensor, group_index: int) -> None:
        """Let a parameter wait."""
        self._params.setdefault(group_index, []).append(p)
        self._grads[id(p)] = p.grad
        self.nbytes += local_part(p).nbytes

    def holds_gradient_of(self, p: Tensor) -> bool:
        """Whether the gradient that a parameter has is one that waits here."""
        return self._grads.get(id(p)) is p.grad

    def step(self, optimizer: FlashOptimizer) -> None:
        """Step the parameters and free their gradients; those of a group that the optimizer refuses go on waiting."""
        if self._stream is None or self._stream == torch.cuda.current_stream(self._stream.device):
            self._step(optimizer)
            return
        # At the end of a backward pass (FSDP2 reduces gradients on a stream of its own).
        with torch.cuda.stream(self._stream):
            self._step(optimizer)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _step(self, optimizer: FlashOptimizer) -> None:
        for group_index in list(self._params):
            # Looked up now: load_state_dict and schedulers replace groups and what is in them.
            optimizer.step_params(self._params[group_index], optimizer.param_groups[group_index])
            for p in self._params.pop(group_index):
                p.grad = None
        self._grads.clear()
        self.nbytes = 0

    def free(self) -> None:
        """Free the gradients."""
        for params in self._params.values():
            for p in params:
                p.grad = None


class GradientReleaseHandle:
    """Holds the hooks of ``enable_gradient_release``, and the parameters that wait for their step.

    A backward pass that raises leaves the gradients that waited where they are, in ``p.grad``: ``optimizer.step()``
    steps and frees them, ``zero_grad()`` drops them.
    """

    def __init__(self, optimizer: FlashOptimizer, clipping: Clipping | None, bytes_to_hold: int) -> None:
        self._optimizer = optimizer
        self._clipping = clipping
        self._bytes_to_hold = bytes_to_hold
        # By backward pass, device and stream: each is filled by one thread, for the engine has one for every device.
        self._buckets: dict[tuple[object, ...], Bucket] = {}
        self._released: set[int] = set()
        self._user_steps = False
        self._hooks: list[RemovableHandle] = [optimizer.register_step_post_hook(self._on_step)]

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Remove the hooks: ``optimizer.step()`` steps all parameters again."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizer.gradient_release = None

    def _on_step(self, *_: object) -> None:
        self._user_steps = True
        self._released.clear()
        # What a backward pass that raised has left is stepped by now.
        for bucket in self._buckets.values():
            bucket.free()
        self._buckets.clear()
        if self._clipping is not None:
            self._clipping.finish_step()

    def _release(self, p: Tensor, group_index: int, pre_step: Callable[[Tensor, dict[str, Any]], bool] | None) -> None:
        if p.grad is None:
            return
        waits = any(bucket.holds_gradient_of(p) for bucket in list(self._buckets.values()))
        if waits or (self._user_steps and id(p) in self._released):
            raise RuntimeError(
                f"A parameter of shape {tuple(p.shape)} got a second gradient before optimizer.step(). Gradient "
                "release steps at every gradient, so it cannot accumulate: use one backward pass a step, and "
                "gradient checkpointing with use_reentrant=False."
            )
        self._released.add(id(p))
        if pre_step is not None and not pre_step(p, self._optimizer.param_groups[group_index]):
            p.grad = None
            return
        if self._clipping is not None:
            self._clipping.clip_(p.grad)
        # Outside of any backward pass there is nothing to wait for, and compiled ones take no callbacks.
        backward_pass = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
        if backward_pass < 0:
            self._optimizer.step_param(p, self._optimizer.param_groups[group_index])
            p.grad = None
            return
        bucket = self._bucket(backward_pass, p.device)
        bucket.add(p, group_index)
        if bucket.nbytes >= self._bytes_to_hold:
            bucket.step(self._optimizer)

    def _bucket(self, backward_pass: int, device: torch.device) -> Bucket:
        on_gpu = device.type == "cuda"
        key = (backward_pass, device, torch._C._cuda_getCurrentRawStream(device.index) if on_gpu else None)
        if key not in self._buckets:
            self._buckets[key] = Bucket(torch.cuda.current_stream(device) if on_gpu else None)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, key))
        return self._buckets[key]

    def _finish(self, key: tuple[object, ...]) -> None:
        if key in self._buckets:
            self._buckets[key].step(self._optimizer)
            del self._buckets[key]


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrappers."""
    while not isinstance(optimizer, FlashOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


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

    When ``backward()`` returns, all are stepped and no gradient is left. Go on calling ``optimizer.step()`` and
    ``optimizer.zero_grad()``: they find nothing left to do for these parameters (others of the optimizer are stepped as
    ever) and mark where a step ends.

    Args:
        model: its trainable parameters that belong to the optimizer are released. FSDP2 (``fully_shard``) works.
        optimizer: a FlashOptimizer, or a wrapper that has it as ``.optimizer`` (accelerate).
        grad_scaler: must be None.
        pre_step: called with parameter and group when a gradient is there; False drops this gradient.
        max_grad_norm: clip gradients to this norm, in one of the ways that need no global norm.
        clip: ``"parameter"`` or ``"previous_step"``, see ``Clipping``.

    Returns:
        A handle whose ``remove()`` undoes this.

    Raises:
        TypeError: for a model in DistributedDataParallel or FSDP1, or an optimizer of another kind.
        NotImplementedError: for a GradScaler.
        ValueError: if release is already on, if the optimizer has no parameter of the model, or for a clipping option
            that is not valid.
        RuntimeError: (in a later backward pass) if a parameter gets two gradients in one step.
    """
    optimizer = unwrap(optimizer)
    _refuse(model, optimizer, grad_scaler)
    clipping = None if max_grad_norm is None else Clipping(max_grad_norm, clip)
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    params = [p for p in model.parameters() if p.requires_grad and id(p) in group_of]
    if not params:
        raise ValueError(
            "No trainable parameter of this model belongs to the optimizer; make the optimizer of the model that is "
            "trained (a copy of a model has parameters of its own)."
        )
    handle = GradientReleaseHandle(optimizer, clipping, gradient_bytes_to_hold(params))
    reference = weakref.ref(handle)
    for p in params:
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
