"""Which layers of a model POET-X can wrap: linear ones, plain or quantized, that no other module shares."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import TaskType
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from peft.utils.quantization_utils import (
    ForwardOnlyQuantizationBackend,
    get_quantization_kwargs,
    resolve_quantization_backend,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .checkpoint import is_stacked_expert
from .config import PoetXConfig
from .layer import PoetXLayer

# In transformers' mixers; they call in_proj.
_READ_BY_FUSED_MIXERS = {"x_proj", "dt_proj", "out_proj"}
_HEADS = {TaskType.TOKEN_CLS: SEQ_CLS_HEAD_NAMES, TaskType.QUESTION_ANS: ["qa_outputs"]}


def check_targets(model: nn.Module, config: PoetXConfig, is_target: Callable[[str], bool]) -> None:
    """Refuse what cannot be wrapped, before anything has been.

    Args:
        model: with what is to be wrapped, and perhaps layers of other adapters.
        config: of the new adapter.
        is_target: whether a module of this name is to be wrapped.

    Raises:
        ValueError: for a target that is no linear layer, shares its weight, or is quantized, offloaded or of a dtype
            that the configuration cannot be applied to; it names the target.
    """
    owners, parents, bypassed = _owners_of_weights(model), _parents(model), set(bypassed_names(model))
    wrapped = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PoetXLayer))
    for name, module in model.named_modules():
        if name.startswith(wrapped) or not is_target(name):
            continue
        if isinstance(module, PoetXLayer):
            _check_weight(config, name, module.get_base_layer().weight, module.quantization_backend)
            continue
        backend = quantization_backend(model, module)
        if not isinstance(module, nn.Linear | Conv1D) and (backend is None or backend.layer_type != "linear"):
            raise ValueError(
                f"target {name!r} is a {type(module).__name__}; POET-X wraps linear layers (nn.Linear, Conv1D "
                "and their quantized kinds). Leave it out of target_modules"
            )
        if name in bypassed:
            raise ValueError(
                f"target {name!r} is part of torch's own attention, or of a state-space mixer, which reads its weight "
                "past the layer, so that a rotation would not be used. Leave it out of target_modules"
            )
        sharers = set() if backend is not None else owners[_weight_key(module.weight)] | parents[id(module)]
        if len(sharers) > 1:
            raise ValueError(
                f"target {name!r} shares its weight with {sorted(sharers)}; a merge into it "
                "would change them all. Leave it out of target_modules (train_rest=True trains it), or untie it"
            )
        _check_weight(config, name, module.weight, backend)


def _check_weight(config: PoetXConfig, name: str, weight: Tensor, backend: Any) -> None:
    if backend is not None:
        _check_quantized(config, name)
        return
    if config.base_error_bits and weight.dtype != torch.bfloat16:
        raise ValueError(
            f"base_error_bits={config.base_error_bits} extends bfloat16 weights, but that of {name!r} is "
            f"{weight.dtype}; load the model in bfloat16, or use base_error_bits=0"
        )
    if weight.is_meta and (config.init == "normalize" or config.base_error_bits):
        raise ValueError(
            f"the weight of {name!r} is not in memory, so it can neither be normalized nor keep error bits; "
            "load the model without offload, or use PoetXConfig(init='keep', base_error_bits=0)"
        )


def router_names(model: nn.Module) -> Iterator[str]:
    """Names of the linear layers that only choose or weigh experts: a rotation of their few outputs would mix choices.

    Those called routers are; a "gate" is if its width is one, or a number of experts in the model's configuration,
    since many a layer of full width is called a gate too.
    """
    counts = {1, *_expert_counts(BaseTuner.get_model_config(model))}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        last_two = name.split(".")[-2:]
        gate = last_two[-1] == "gate" or last_two[-1].endswith("_gate")
        if any("router" in part for part in last_two) or (gate and module.out_features in counts):
            yield name


def bypassed_names(model: nn.Module) -> Iterator[str]:
    """Names of linear layers whose weights are read without calling the layers.

    That is by torch's own attention, and by the fused kernels of state-space mixers (Mamba and its like).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            for inner_name, inner in module.named_modules(prefix=name):
                if isinstance(inner, nn.Linear):
                    yield inner_name
        # Linear attention has decays as well, but no skip weight D.
        elif {"A_log", "D"} <= module._parameters.keys():
            for part in _READ_BY_FUSED_MIXERS & module._modules.keys():
                yield f"{name}.{part}".removeprefix(".")


def head_names(model: nn.Module, task_type: str | None) -> Iterator[str]:
    """Names of the modules of a task's new head, which PEFT trains whole and does not keep from being targets itself."""
    for head in _HEADS.get(task_type, ()):
        if isinstance(module := getattr(model, head, None), nn.Module):
            yield from (name for name, _ in module.named_modules(prefix=head))


def _expert_counts(config: dict[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _expert_counts(value)
        elif "expert" in str(key) and isinstance(value, int):
            yield value


def warn_about_experts(model: nn.Module) -> None:
    """Say which weights of experts no linear layer holds, so that they stay frozen."""
    experts = [name for name, parameter in model.named_parameters() if is_stacked_expert(name, parameter)]
    if experts:
        warnings.warn(
            f"{len(experts)} stacked expert weights stay frozen, also with train_rest=True, for example "
            f"{experts[0]!r}: POET-X wraps linear layers, and these are none",
            stacklevel=2,
        )


def _weight_key(weight: Tensor) -> int:
    """The same for two parameters of one storage, which need not be one object."""
    return weight.data_ptr() if weight.device.type != "meta" and weight.numel() else id(weight)


def _owners_of_weights(model: nn.Module) -> dict[int, set[str]]:
    """Names of the distinct modules that hold each weight; a module that is used twice is one."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(_weight_key(parameter), set()).add(name)
    return owners


def _parents(model: nn.Module) -> dict[int, set[str]]:
    """Names under which each module hangs from distinct parents; only one of them could be replaced."""
    parents: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for child_name, child in module._modules.items():
            parents.setdefault(id(child), set()).add(f"{name}.{child_name}".removeprefix("."))
    return parents


def _check_quantized(config: PoetXConfig, name: str) -> None:
    for field, allowed in (("merge_interval", 0), ("init", "keep"), ("base_error_bits", 0), ("track_spectrum", False)):
        if getattr(config, field) != allowed:
            raise ValueError(
                f"target {name!r} is quantized, so its weight cannot be rewritten truly; use PoetXConfig({field}="
                f"{allowed!r}) instead of {field}={getattr(config, field)!r}"
            )


def quantization_backend(model: nn.Module, target: nn.Module) -> Any:
    """PEFT's backend for a layer with a quantized weight, None for a plain one."""
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    try:
        backend = resolve_quantization_backend(base, **get_quantization_kwargs(model))
    except ValueError:
        # torchao without a transformers quantizer cannot requantize; its forward pass still works.
        return ForwardOnlyQuantizationBackend("torchao")
    weight = getattr(base, "weight", None)
    if (
        backend is None
        and isinstance(base, nn.Linear)
        and (weight.dtype.itemsize < 2 or not weight.is_floating_point())
    ):
        # What PEFT does not know, such as float8: the numbers in the weight are not the weight.
        return ForwardOnlyQuantizationBackend(str(weight.dtype).removeprefix("torch."))
    return backend
