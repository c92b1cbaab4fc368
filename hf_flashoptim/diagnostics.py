"""How much compression costs right now: rounding errors of the moments, and updates that round to nothing."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_flashoptim.ops.error_correction import reconstruct_master_weight
from hf_flashoptim.optimizer import FlashOptimizer
from hf_flashoptim.sharding import local_part


@dataclass(frozen=True)
class CompressionError:
    """What compression does to one parameter in one step.

    Attributes:
        nmse: for each moment by name, ``sum((stored - exact)^2) / sum(exact^2)``, where both start from the same stored
            state and exact is the moment before it is encoded; empty for parameters with fp32 moments.
        lost_updates: share of the weights that an exact step would change and the real one does not.
    """

    nmse: dict[str, float]
    lost_updates: float


@torch.no_grad()
def compression_error(optimizer: FlashOptimizer, p: Tensor) -> CompressionError:
    """Compare the next step of one parameter with an exact one; neither touches parameter or optimizer.

    Args:
        optimizer: has the parameter.
        p: has a gradient. Of a sharded parameter, this rank's part is looked at.

    Raises:
        ValueError: without a gradient.
    """
    if p.grad is None:
        raise ValueError(f"A parameter of shape {tuple(p.shape)} has no gradient; call this before optimizer.step().")
    group = optimizer.group_of(p)
    state = {key: local_part(value).clone() for key, value in optimizer.state.get(p, {}).items()}
    grad = local_part(p.grad)
    stored = local_part(p.detach()).clone()
    before = _master(stored, state).clone()
    exact = before.clone()
    exact_state = dict(state)
    for moment in optimizer.moments(group):
        if moment.codes_key in state:
            exact_state[moment.name] = moment.dequantize(
                exact_state.pop(moment.codes_key), exact_state.pop(moment.scale_key)
            )
    exact_state.pop("error_bits", None)
    if "step" in exact_state:
        exact_state["step"] = exact_state["step"].clone()
    state = _step_alone(optimizer, group, stored, grad, state, {})
    exact_state = _step_alone(optimizer, group, exact, grad.float(), exact_state, {"quantize": False})
    nmse = {}
    for moment in optimizer.moments(group):
        if moment.codes_key in state:
            decoded = moment.dequantize(state[moment.codes_key], state[moment.scale_key]).double()
            truth = exact_state[moment.name].double()
            power = truth.square().sum()
            nmse[moment.name] = float((decoded - truth).square().sum() / power) if power else 0.0
    moved = exact != before
    lost = moved & (_master(stored, state) == before)
    return CompressionError(nmse, float(lost.sum() / moved.sum().clamp(min=1)))


def compression_report(optimizer: FlashOptimizer, model: nn.Module) -> dict[str, CompressionError]:
    """``compression_error`` of every parameter of the model that has a gradient, by name."""
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    return {
        name: compression_error(optimizer, p)
        for name, p in model.named_parameters()
        if p in owned and p.grad is not None and local_part(p).numel()
    }


def _master(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    errors = state.get("error_bits")
    return param.float() if errors is None else reconstruct_master_weight(param.contiguous(), errors)


def _step_alone(
    optimizer: FlashOptimizer,
    group: dict[str, Any],
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Step a copy of a parameter in place with an optimizer of its own; its new state."""
    p = nn.Parameter(weight)
    p.grad = grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what the real optimizer was already warned of
        alone = type(optimizer)([{**group, **options, "params": [p]}])
    alone.state[p] = state
    alone.step()
    return alone.state[p]
