"""A model's weights in fp32, out of parameters and error bits, and back; error bits of another width."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_flashoptim.ops.error_correction import compute_error_bits, reconstruct_master_weight, split_master_weight
from hf_flashoptim.sharding import distribute_like, local_part, map_local, zeros_for

if TYPE_CHECKING:
    from hf_flashoptim.optimizer import FlashOptimizer


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def fp32_model_state_dict(optimizer: "FlashOptimizer", model: nn.Module) -> dict[str, Tensor]:
    """See ``FlashOptimizer.get_fp32_model_state_dict``."""
    model = _unwrapped(model)
    weights = {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        for name, tensor in model.state_dict().items()
    }
    for name, p in model.named_parameters(remove_duplicate=False):
        errors = optimizer.state.get(p, {}).get("error_bits")
        if errors is not None and name in weights:
            weights[name] = map_local(p, _reconstruct, p.detach(), errors)
    return weights


def load_fp32_model_state_dict(optimizer: "FlashOptimizer", model: nn.Module, weights: dict[str, Tensor]) -> None:
    """See ``FlashOptimizer.set_fp32_model_state_dict``."""
    model = _unwrapped(model)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    targets = {name: own[name] for name in weights if name in own}
    if weights and not targets:
        raise ValueError(f"The model has no tensor called {sorted(weights)[0]!r}, nor any other of these names.")
    if unknown := sorted(set(weights) - set(targets)):
        warnings.warn(f"The model has no tensors called {unknown}; they are left out.", stacklevel=3)
    for name, target in targets.items():
        value = weights[name]
        if value.is_floating_point() and value.dtype != torch.float32:
            raise ValueError(f"{name!r} is {value.dtype}; expected torch.float32.")
        if value.shape != target.shape:
            raise ValueError(f"{name!r} has shape {tuple(value.shape)}; the model's has {tuple(target.shape)}.")
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, target in targets.items():
        value = local_part(distribute_like(target, weights[name].to(local_part(target).device)))
        errors = None
        if target in groups and optimizer.error_dtype(target, groups[target]):
            errors = optimizer.ensure_state(target, groups[target])["error_bits"]
        for destination, part in _parts(target.detach(), errors, value):
            local_part(destination).copy_(part)


def _parts(target: Tensor, errors: Tensor | None, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if errors is None:
        yield target, value
    else:
        yield from zip(
            (target, errors), split_master_weight(value.contiguous(), target.dtype, errors.dtype), strict=True
        )


def _reconstruct(narrow: Tensor, errors: Tensor) -> Tensor:
    return reconstruct_master_weight(narrow.contiguous(), errors)


def refit_error_bits(p: Tensor, state: dict[str, Tensor], error_dtype: torch.dtype | None) -> None:
    """Give a parameter's state the error bits it needs since its model was cast or ``master_weight_bits`` changed.

    Args:
        p: the parameter as it is now.
        state: its state, changed in place.
        error_dtype: int8, int16, or None for no error bits; existing ones are then dropped with a warning.
    """
    errors = state.pop("error_bits", None)
    if error_dtype is not None:
        state["error_bits"] = error_bits_of_width(p, errors, error_dtype)
    elif errors is not None:
        warnings.warn(
            f"A parameter of shape {tuple(p.shape)} is {p.dtype} now, or its group has master_weight_bits=None: its error "
            "bits are dropped. get_fp32_model_state_dict before the change gives weights that include them.",
            stacklevel=2,
        )


def error_bits_of_width(p: Tensor, errors: Tensor | None, error_dtype: torch.dtype) -> Tensor:
    """Error bits of a 16-bit parameter as int8 or int16, from those of either width; zeros from None."""
    if errors is None:
        return zeros_for(p, error_dtype)
    if errors.dtype == error_dtype:
        return errors
    return map_local(p, lambda n, e: _convert_error_bits(n, e, error_dtype), p.detach(), errors)


def _convert_error_bits(narrow: Tensor, errors: Tensor, error_dtype: torch.dtype) -> Tensor:
    narrow = narrow.contiguous()
    return compute_error_bits(reconstruct_master_weight(narrow, errors), narrow, error_dtype)
