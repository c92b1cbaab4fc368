"""State dicts: out of a FlashOptimizer, and back in from one, from ``torch.optim``, or from flashoptim 0.1.4.

Written, for each parameter: ``step``; each moment as ``<name>_codes`` and ``<name>_scale``, or as fp32 under torch's
own name (parameters kept out of compression, or ``compress_state_dict=False``); ``error_bits`` as int8 of the
parameter's shape or, for int16, as its bytes, uint8 ``[*shape, 2]``: collectives and casts that have no int16 or would
round it leave bytes alone. Everything is plain tensors and numbers.

Reading validates everything, converts it to the formats of the optimizer's groups, and only then lets the optimizer
have it. ``torch.optim.Optimizer.load_state_dict`` is not used: it casts state to the parameter's dtype.
"""

import copy
import math
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_flashoptim import foreign, master_weights
from hf_flashoptim.moments import Moment
from hf_flashoptim.ops.layout import scale_shape
from hf_flashoptim.sharding import distribute_like, local_part, map_local, zeros_for

if TYPE_CHECKING:
    from hf_flashoptim.optimizer import FlashOptimizer

State = dict[str, Any]
# What this optimizer decides for itself, whatever a state dict says.
_FORMAT_KEYS = ("params", "param_names", "quantize", "master_weight_bits")


def byte_shape(shape: torch.Size) -> tuple[int, ...]:
    """Shape of int16 error bits as bytes."""
    return (*shape, 2)


def to_state_dict(optimizer: "FlashOptimizer", packed: State, *, compress: bool) -> State:
    """Turn what ``torch.optim.Optimizer.state_dict`` returns into the written form, leaving live state alone."""
    states = dict(packed["state"])
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for p, index in zip(group["params"], packed_group["params"], strict=True):
            if index not in states:
                continue
            state = states[index] = dict(states[index])
            errors = state.get("error_bits")
            if errors is not None and errors.dtype == torch.int16:
                state["error_bits"] = map_local(p, _to_bytes, errors, shape_map=byte_shape)
            if compress:
                continue
            for moment in optimizer.moments(group):
                if moment.codes_key in state:
                    codes, scale = state.pop(moment.codes_key), state.pop(moment.scale_key)
                    state[moment.name] = map_local(p, moment.dequantize, codes, scale)
    return {**packed, "state": states}


def from_state_dict(optimizer: "FlashOptimizer", state_dict: State) -> tuple[defaultdict[Tensor, State], list[State]]:
    """New state and groups for an optimizer, from a state dict that is checked in full.

    Raises:
        ValueError: if the state dict does not fit, saying which parameter and why.
    """
    saved_states, saved_groups = _checked_structure(optimizer, state_dict)
    state: defaultdict[Tensor, State] = defaultdict(dict)
    groups = []
    left = dict(saved_states)
    for number, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        new_group = _merged_group(optimizer, group, saved_group)
        groups.append(new_group)
        for position, (p, index) in enumerate(zip(group["params"], saved_group["params"], strict=True)):
            saved = left.pop(index, None)
            if not saved:
                continue
            try:
                loaded = _load_parameter(optimizer, p, new_group, dict(saved), saved_group)
            except ValueError as error:
                raise ValueError(
                    f"The state of parameter {position} in group {number} (shape {tuple(p.shape)}, {p.dtype}) cannot "
                    f"be loaded: {error}"
                ) from error
            if loaded:
                state[p] = loaded
    if left:
        raise ValueError(
            f"The state dict has state for parameters that none of its groups lists: {sorted(left, key=str)}."
        )
    return state, groups


def _checked_structure(optimizer: "FlashOptimizer", state_dict: State) -> tuple[State, list[State]]:
    try:
        states, groups = state_dict["state"], state_dict["param_groups"]
        saved_sizes = [len(group["params"]) for group in groups]
        states.items()
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "This is not an optimizer's state dict: it needs 'state' (a dict) and 'param_groups' (a list of dicts with "
            f"'params'); {type(error).__name__}: {error}."
        ) from error
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state dict has groups of {saved_sizes} parameters, the optimizer has {sizes}. Make groups as the run "
            "did that saved it."
        )
    return states, groups


def _merged_group(optimizer: "FlashOptimizer", group: State, saved: State) -> State:
    """The optimizer's group with the saved hyperparameters; formats stay the optimizer's own."""
    if saved.get("amsgrad"):
        raise ValueError(
            "The state dict is of an optimizer with amsgrad=True, which compressed optimizers do not have."
        )
    ignored = (*foreign.GROUP_SWITCHES, *_FORMAT_KEYS)
    # Copied, like all state: a learning rate may be a tensor, and betas a list.
    merged = {**group, **{key: copy.deepcopy(value) for key, value in saved.items() if key not in ignored}}
    if "reference_lr" not in saved:
        merged["reference_lr"] = float(saved.get("initial_lr", merged["lr"]))
    optimizer.check_group(merged)
    return merged


def _load_parameter(optimizer: "FlashOptimizer", p: Tensor, group: State, saved: State, saved_group: State) -> State:
    """One parameter's state in the formats of its group; consumes ``saved`` and refuses what is left of it."""
    saved = {key: value for key, value in saved.items() if value is not None}
    moments = optimizer.moments(group)
    loaded: State = {}
    step = saved.pop("step", optimizer.step_without_counter)
    if moments and not any(key.startswith(moment.name) for moment in moments for key in saved):
        # torch's SGD before its first step has a parameter but no buffer.
        if step is optimizer.step_without_counter:
            moments = ()
    if moments and optimizer.counts_steps(group):
        loaded["step"] = _step(p, step)
    for moment in moments:
        loaded.update(_moment(p, moment, saved, quantized=optimizer.is_quantized(p, group)))
    errors = saved.pop("error_bits", None)
    if error_dtype := optimizer.error_dtype(p, group):
        loaded["error_bits"] = _error_bits(p, errors, error_dtype, saved_group)
    elif errors is not None:
        warnings.warn(
            "The state dict has error bits, which fp32 parameters and master_weight_bits=None have no place for: they are "
            "dropped, and weights are those that the model was loaded with. get_fp32_model_state_dict of the optimizer "
            "that was saved gives the exact ones.",
            stacklevel=2,
        )
    if saved:
        raise ValueError(
            f"it has {sorted(saved)}, which {type(optimizer).__name__} does not keep. Was it saved by another optimizer?"
        )
    return loaded


def _step(p: Tensor, step: Any) -> Tensor:
    if step is None:
        raise ValueError("it has no 'step'.")
    value = float(step)
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        raise ValueError(f"its step is {value}, not a count.")
    return torch.tensor(value, dtype=torch.float32, device=local_part(p).device)


def _moment(p: Tensor, moment: Moment, saved: State, *, quantized: bool) -> State:
    """Pop one moment in whichever format it was saved, and return it as codes and scales or in fp32."""
    if moment.codes_key in saved or moment.scale_key in saved:
        codes = _take(p, saved, moment.codes_key, p.shape, moment.code_dtype)
        scale = _take(p, saved, moment.scale_key, scale_shape(p.shape) if p.ndim >= 2 else (), torch.bfloat16)
        if (local_part(scale) < 0).any():
            raise ValueError(f"'{moment.scale_key}' has negative entries: the file is damaged.")
        if quantized:
            return {moment.codes_key: codes, moment.scale_key: scale}
        return {moment.name: map_local(p, moment.dequantize, codes, scale)}
    if moment.name + foreign.CODES_SUFFIX in saved:
        value = distribute_like(p, foreign.decode_moment(p, moment, saved))
    else:
        value = _take(p, saved, moment.name, p.shape, None).to(torch.float32)
    if not quantized:
        return {moment.name: value}
    return {
        moment.codes_key: map_local(p, lambda v: moment.quantize(v)[0], value),
        moment.scale_key: map_local(p, lambda v: moment.quantize(v)[1], value, shape_map=scale_shape),
    }


def _take(p: Tensor, saved: State, key: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """Pop a tensor of this shape and dtype (None: any floating one), copied to where the parameter is."""
    value = saved.pop(key, None)
    if not isinstance(value, Tensor):
        raise ValueError(f"'{key}' is {'missing' if value is None else type(value).__name__}; expected a tensor.")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"'{key}' has shape {tuple(value.shape)}; expected {tuple(shape)}.")
    if value.dtype != dtype and (dtype is not None or not value.is_floating_point()):
        raise ValueError(f"'{key}' is {value.dtype}; expected {dtype or 'a floating dtype'}.")
    return _placed_like(p, value)


def _placed_like(p: Tensor, value: Tensor) -> Tensor:
    """A contiguous copy on the parameter's device and, for a DTensor, in its mesh."""
    if isinstance(value, DTensor) and not isinstance(p, DTensor):
        value = value.full_tensor()
    value = value.detach().to(local_part(p).device)
    value = distribute_like(p, value)
    return value.clone(memory_format=torch.contiguous_format)


def _error_bits(p: Tensor, saved: Any, error_dtype: torch.dtype, saved_group: State) -> Tensor:
    """Error bits of the wanted width, from whatever was saved; zeros where there is nothing to use."""
    if saved is None:
        return zeros_for(p, error_dtype)
    if foreign.is_flashoptim(saved_group):
        saved = {"error_bits": saved}
        errors = _take(p, saved, "error_bits", p.shape, saved["error_bits"].dtype)
        return map_local(p, lambda n, e: foreign.convert_error_bits(n, e, saved_group, error_dtype), p, errors)
    if isinstance(saved, Tensor) and saved.is_floating_point() and foreign.is_torch(saved_group):
        warnings.warn(
            "Error bits that went through a torch optimizer are dropped: it rounded them, and its steps outdated them.",
            stacklevel=2,
        )
        return zeros_for(p, error_dtype)
    if isinstance(saved, Tensor) and saved.dtype == torch.uint8:
        as_bytes = _take(p, {"error_bits": saved}, "error_bits", byte_shape(p.shape), torch.uint8)
        errors = map_local(p, lambda b: b.view(torch.int16).squeeze(-1), as_bytes)
    else:
        dtype = torch.int8 if getattr(saved, "dtype", None) == torch.int8 else torch.int16
        errors = _take(p, {"error_bits": saved}, "error_bits", p.shape, dtype)
    return master_weights.error_bits_of_width(p, errors, error_dtype)


def _to_bytes(errors: Tensor) -> Tensor:
    return errors.unsqueeze(-1).view(torch.uint8)
