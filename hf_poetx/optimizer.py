"""Optimizers for POET-X: parameter groups of the skew entries, and a reset of exactly their state after a merge."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint import poetx_layers
from .ops.skew import block_size

# The block at which `poet_scale` is what it says.
REFERENCE_BLOCK = 256

# State of torch's own optimizers that does not start at zero: (optimizer, key) -> start value or name of an option.
_NONZERO_START: dict[tuple[str, str], float | str] = {
    ("NAdam", "mu_product"): 1.0,
    ("Adagrad", "sum"): "initial_accumulator_value",
}
_ZERO_START = (
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "SGD",
    "RMSprop",
    "Adadelta",
    "Adagrad",
    "Adafactor",
    "Muon",
)


def skew_learning_rate(lr: float, block: int, poet_scale: float) -> float:
    """Learning rate of skew entries such that a rate means the same at every block size.

    A rotation's angle is set by the singular values of Q, and those of a block with entries of size q grow as
    ``2 q sqrt(block)``; Adam moves every entry by about the learning rate. So the rate goes as ``1 / sqrt(block)``.

    Example:
        >>> skew_learning_rate(1e-3, 256, 0.5), skew_learning_rate(1e-3, 64, 0.5)
        (0.0005, 0.001)
    """
    return lr * poet_scale * (REFERENCE_BLOCK / block) ** 0.5


def trainable_skew(model: nn.Module) -> dict[nn.Parameter, float]:
    """All trainable skew parameters of a model with the `poet_scale` of their adapter."""
    return {
        parameter: config.poet_scale
        for _, layer in poetx_layers(model)
        for adapter_name, config in layer.poetx_config.items()
        for parameter in layer.skew_parameters(adapter_name)
        if parameter.requires_grad
    }


def add_skew_groups(groups: Iterable[dict[str, Any]], model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Move skew entries out of parameter groups into groups of their own: scaled rate, no weight decay.

    Args:
        groups: as an optimizer takes them; options of a group that held skew entries are kept for those.
        model: holds the POET-X layers.
        lr: of groups that state none.

    Returns:
        The groups without skew entries, in their order, then one for each block size.
    """
    scales = trainable_skew(model)
    rest, skew = [], {}
    for group in groups:
        rest.append({**group, "params": [p for p in group["params"] if p not in scales]})
        for parameter in group["params"]:
            if parameter in scales:
                rate = skew_learning_rate(group.get("lr", lr), block_size(parameter), scales[parameter])
                options = {key: value for key, value in group.items() if key not in ("params", "lr", "weight_decay")}
                skew.setdefault(rate, {**options, "params": [], "lr": rate, "weight_decay": 0.0})
                skew[rate]["params"].append(parameter)
    return [group for group in rest if group["params"]] + [skew[rate] for rate in sorted(skew)]


def create_poetx_optimizer(
    model: nn.Module, optimizer_cls: type[Optimizer], lr: float, weight_decay: float = 0.0, **options: Any
) -> Optimizer:
    """An optimizer over a model's trainable parameters with the skew entries in groups of their own.

    Args:
        model: from `get_poetx_model`.
        optimizer_cls: any class that takes parameter groups, such as `torch.optim.AdamW`.
        lr: of everything but the skew entries; theirs follows from it (`skew_learning_rate`).
        weight_decay: of matrices outside the rotations; vectors and skew entries have none.
        **options: passed on.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return optimizer_cls(add_skew_groups(groups, model, lr), lr=lr, **options)


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of accelerate."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_resettable(optimizer: Any) -> None:
    """Raise TypeError, naming the optimizer, if `reset_optimizer_state` does not know how to reset it."""
    optimizer = unwrap_optimizer(optimizer)
    if hasattr(optimizer, "reset_state") or _reset_rule(optimizer) is not None:
        return
    raise TypeError(
        f"POET-X resets the optimizer state of its skew entries after a merge and does not know how for "
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}; give it a method reset_state(params), "
        "or use PoetXConfig(merge_interval=0)"
    )


@torch.no_grad()
def reset_optimizer_state(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Put the state of some parameters back to its start, in place, and leave all else alone.

    It calls ``optimizer.reset_state(params)`` if there is one. State is never removed, which would break the next
    distributed checkpoint, and quantized state is not zeroed but initialised by its optimizer.

    Raises:
        TypeError: for an unknown optimizer.
    """
    check_resettable(optimizer)
    optimizer, params = unwrap_optimizer(optimizer), list(params)
    if hasattr(optimizer, "reset_state"):
        optimizer.reset_state(params)
        return
    rule, wanted = _reset_rule(optimizer), set(params)
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter in wanted and optimizer.state.get(parameter):
                rule(optimizer, group, parameter, group_index, index)


def _reset_rule(optimizer: Any):
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _ZERO_START:
            return _reset_zero_start
        if cls.__module__ == "transformers.optimization" and cls.__name__ == "Adafactor":
            return _reset_zero_start
        if package == "bitsandbytes" and hasattr(optimizer, "init_state"):
            return _reset_bitsandbytes
        if package == "torchao":
            return _reset_zero_start
    return None


def _reset_zero_start(optimizer: Optimizer, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
    state = optimizer.state[parameter]
    for key, value in state.items():
        start = _NONZERO_START.get((type(optimizer).__name__, key), 0.0)
        start = group[start] if isinstance(start, str) else start
        if isinstance(value, Tensor):
            # Not fill_: quantized tensor subclasses know how to copy, since that is how they are written.
            value.copy_(torch.full(value.shape, start, dtype=value.dtype, device=value.device))
        elif isinstance(value, int | float):
            state[key] = type(value)(start)


def _reset_bitsandbytes(optimizer: Any, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
    optimizer.init_state(group, parameter, group_index, index)
