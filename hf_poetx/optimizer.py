"""Optimizers for POET-X: parameter groups of the skew entries, and a reset of exactly their state after a merge."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint import poetx_layers
from .ops.skew import block_size

# The block at which `poet_scale` is what it says.
REFERENCE_BLOCK = 256


def skew_learning_rate(lr: float, block: int, poet_scale: float) -> float:
    """Learning rate of skew entries such that a rate means the same at every block size.

    Adam moves every entry by about the learning rate, and where a gradient keeps its signs from step to step they move
    together: Q, of entries that are all as large as q, then has a singular value of up to ``2 q block / pi``, which is a
    rotation's angle. So the rate goes as ``1 / block``: the best of several was then the same for blocks of 32 and 128 and
    half of it for 8 (`benchmarks/results/pretraining_learning_rate.json`).

    Example:
        >>> skew_learning_rate(1e-3, 256, 0.5), skew_learning_rate(1e-3, 64, 0.5)
        (0.0005, 0.002)
    """
    return lr * poet_scale * REFERENCE_BLOCK / block


def trainable_skew(model: nn.Module) -> dict[nn.Parameter, float]:
    """All trainable skew parameters of a model with the `poet_scale` of their adapter."""
    return {
        parameter: config.poet_scale
        for _, layer in poetx_layers(model)
        for adapter_name, config in layer.poetx_config.items()
        for parameter in layer.skew_parameters(adapter_name)
        if parameter.requires_grad
    }


def add_skew_groups(groups: Iterable[Any], model: nn.Module, lr: float | None = None) -> list[dict[str, Any]]:
    """Move skew entries out of parameter groups into groups of their own: scaled rate, no weight decay.

    Args:
        groups: what an optimizer takes, parameters or groups of them, named or not; other options of a group that
            held skew entries are kept for those.
        model: holds the POET-X layers.
        lr: of groups that state none.

    Returns:
        The groups without skew entries, in their order, then those of the skew entries, one for each learning rate
        and group that they came from. The same model gives the same groups, so optimizer state can be resumed.

    Raises:
        ValueError: if neither `lr` nor a group with skew entries states a learning rate.
    """
    scales = trainable_skew(model)
    groups = list(groups)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    rest: list[dict[str, Any]] = []
    skew: dict[tuple[float, int], dict[str, Any]] = {}
    for index, group in enumerate(groups):
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        rest.append({**group, "params": [member for member in members if _parameter(member) not in scales]})
        for member in members:
            parameter = _parameter(member)
            if parameter not in scales:
                continue
            base = group.get("lr", lr)
            if base is None:
                raise ValueError(
                    "the learning rate of POET-X skew entries is a multiple of the optimizer's, which is None; state lr"
                )
            rate = skew_learning_rate(float(base), block_size(parameter), scales[parameter])
            # Schedulers start from `initial_lr`, which some optimizers fill with their default for every group.
            options = {"lr": rate, "initial_lr": rate, "weight_decay": 0.0}
            skew.setdefault((rate, index), {**group, **options, "params": []})["params"].append(member)
    return [group for group in rest if group["params"]] + [skew[key] for key in sorted(skew)]


def _parameter(member: Any) -> Tensor:
    return member[1] if isinstance(member, tuple) else member


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
    optimizer = optimizer_cls(add_skew_groups(groups, model, lr), lr=lr, **options)
    if "initial_lr" not in optimizer.defaults:
        # Else a scheduler would undo a rate that is set before it is made.
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
    return optimizer


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of accelerate."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_resettable(optimizer: Any) -> None:
    """Raise TypeError, naming the optimizer, if `reset_optimizer_state` does not know how to reset it."""
    optimizer = unwrap_optimizer(optimizer)
    if not hasattr(optimizer, "reset_state") and _reset_rule(optimizer) is None:
        raise TypeError(
            f"POET-X resets the optimizer state of its skew entries after a merge and does not know how for "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}; give it a method reset_state(params), "
            "or use PoetXConfig(merge_interval=0)"
        )


def check_holds(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if a parameter that is trained is in no group of the optimizer: another one has its state."""
    groups = unwrap_optimizer(optimizer).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if any(parameter.requires_grad and id(parameter) not in held for parameter in params):
        raise ValueError(
            f"this {type(unwrap_optimizer(optimizer)).__name__} does not have all POET-X skew entries, whose state a merge "
            "resets; pass the optimizer that trains them"
        )


@torch.no_grad()
def reset_optimizer_state(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Put the state of some parameters back to its start, in place, and leave all else alone.

    The next step of these parameters is the first step of a new optimizer. It calls ``optimizer.reset_state(params)``
    if there is one. State is never removed, which would break the next distributed checkpoint.

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


def _reset_rule(optimizer: Any) -> Callable[[Optimizer, dict, Tensor, int, int], None] | None:
    """How to reset an optimizer, by the class whose `step` it runs: a subclass with its own may keep other state."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return None
    package = ".".join(step.__module__.split(".")[:2])
    return _RESET_RULES.get((package, step.__qualname__.partition(".")[0]))


def _fill(**starts: float | str) -> Callable[[Optimizer, dict, Tensor, int, int], None]:
    """Rule that fills state with zeros, or the given start values or options of the group, by key."""

    def reset(optimizer: Optimizer, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
        state = optimizer.state[parameter]
        for key, value in state.items():
            start = starts.get(key, 0.0)
            start = float(group[start]) if isinstance(start, str) else start
            if isinstance(value, Tensor):
                value.fill_(start)
            elif isinstance(value, int | float):
                state[key] = type(value)(start)

    return reset


def _reset_sgd(optimizer: Optimizer, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
    if group["dampening"]:
        # Its first step does not dampen, and knows a first step by this alone.
        optimizer.state[parameter]["momentum_buffer"] = None
    else:
        _fill()(optimizer, group, parameter, group_index, index)


def _reset_by_init_state(optimizer: Any, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
    """bitsandbytes: let it initialise the state anew, code tables included, and copy that into the old tensors."""
    state = optimizer.state[parameter]
    paged, optimizer.is_paged = optimizer.is_paged, False
    try:
        optimizer.state[parameter] = {}
        optimizer.init_state(group, parameter, group_index, index)
        start = optimizer.state[parameter]
    finally:
        optimizer.state[parameter], optimizer.is_paged = state, paged
    for key, value in start.items():
        if isinstance(value, Tensor):
            state[key].copy_(value)
        else:
            state[key] = value


def _reset_torchao(optimizer: Any, group: dict, parameter: Tensor, group_index: int, index: int) -> None:
    """Quantized tensor subclasses: as for bitsandbytes."""
    state = optimizer.state[parameter]
    state["step"].zero_()
    for key in state.keys() - {"step"}:
        state[key].copy_(optimizer._new_buffer(parameter, key == "exp_avg"))


# By the first two parts of the module and the class that define `step`.
_RESET_RULES = {
    ("torch.optim", "Adam"): _fill(),
    ("torch.optim", "NAdam"): _fill(mu_product=1.0),
    ("torch.optim", "RAdam"): _fill(),
    ("torch.optim", "Adamax"): _fill(),
    ("torch.optim", "AdamW"): _fill(),
    ("torch.optim", "SGD"): _reset_sgd,
    ("torch.optim", "ASGD"): _fill(eta="lr", mu=1.0),
    ("torch.optim", "RMSprop"): _fill(),
    ("torch.optim", "Rprop"): _fill(step_size="lr"),
    ("torch.optim", "Adadelta"): _fill(),
    ("torch.optim", "Adagrad"): _fill(sum="initial_accumulator_value"),
    ("torch.optim", "Adafactor"): _fill(),
    ("torch.optim", "Muon"): _fill(),
    ("transformers.optimization", "Adafactor"): _fill(),
    ("torchao.optim", "_AdamBase"): _reset_torchao,
    ("bitsandbytes.optim", "Optimizer8bit"): _reset_by_init_state,
}
