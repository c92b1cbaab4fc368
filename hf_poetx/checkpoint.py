"""What an adapter file holds, and how it is put back.

PEFT saves what is on the adapter layers. That is not the whole truth of a POET-X model whose transforms were merged
into the base weights, or whose embeddings, norms and head were trained in place, so those base tensors join the file.
"""

import re
import warnings
from collections.abc import Iterator

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import PoetXConfig
from .layer import PoetXLayer

# What the wrappers of torch insert into module names.
_WRAPPER_PARTS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_PEFT_PREFIX = "base_model.model."
# Tells a loader which base tensors the file must hold; see `_contents`.
CONTENTS_KEY = "base_model.poetx_contents"
BASE_WEIGHTS, REST, WHOLE_BASE = 1, 2, 4


def canonical_name(name: str) -> str:
    """Module or parameter name without what compiling, checkpointing and sharding insert into it."""
    return _WRAPPER_PARTS.sub("", name)


def poetx_layers(model: nn.Module) -> Iterator[tuple[str, PoetXLayer]]:
    """All POET-X layers of a model with their canonical names."""
    for name, module in model.named_modules():
        if isinstance(module, PoetXLayer):
            yield canonical_name(name), module


def rest_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What `train_rest` trains in place: all base parameters but wrapped weights and stacked expert weights."""
    inside = tuple(
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, PoetXLayer)
        for part in (*module.adapter_layer_names, "base_layer.weight", "base_layer.base_layer.weight")
    )
    copied = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, AuxiliaryTrainingWrapper))
    for name, parameter in model.named_parameters():
        trained = parameter.is_floating_point() and parameter.dim() < 3
        if trained and not name.startswith(inside) and not name.startswith(copied):
            yield canonical_name(name), parameter


def _contents(config: PoetXConfig, layers: dict[str, PoetXLayer], adapter_name: str) -> int:
    """Which base tensors an adapter's file must hold for its outputs to come back."""
    if config.base_config is not None:
        return WHOLE_BASE
    merged = any(int(layer.poetx_merge_count[adapter_name]) for layer in layers.values())
    contents = REST if config.train_rest else 0
    if merged or any(layer.save_base_weight for layer in layers.values()):
        contents |= BASE_WEIGHTS
    return contents


def _base_names(model: nn.Module, contents: int, layers: dict[str, PoetXLayer]) -> set[str]:
    """Canonical names, in `model`, of the base tensors that `contents` stands for."""
    names = set()
    if contents & BASE_WEIGHTS:
        names |= {f"{name}.base_layer.weight" for name in layers}
    if contents & REST:
        names |= {name for name, _ in rest_parameters(model)}
    if contents & WHOLE_BASE:
        copied = tuple(
            f"{n}.modules_to_save" for n, m in model.named_modules() if isinstance(m, AuxiliaryTrainingWrapper)
        )
        names |= {
            canonical_name(name)
            for name in model.state_dict()
            if ".poetx_" not in name and not name.startswith(copied)
        }
    return names


def _of_adapter(model: nn.Module, adapter_name: str) -> dict[str, PoetXLayer]:
    return {name: layer for name, layer in poetx_layers(model) if adapter_name in layer.poetx_config}


def adapter_state_dict(
    model: nn.Module, config: PoetXConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Select what an adapter's file holds from the state dict of the whole model.

    Tensors are taken from the state dict, never from the model, since sharded training passes gathered ones. Only
    buffers, which are the same on all ranks, come from the model, because they may not be persistent.

    Raises:
        RuntimeError: if a tensor that must be saved is missing or empty, naming it; nothing is ever written short.
    """
    state_dict = {canonical_name(key): value for key, value in state_dict.items()}
    layers = _of_adapter(model, adapter_name)
    if not layers:
        raise RuntimeError(f"adapter {adapter_name!r} has no POET-X layer in this model; nothing would be saved")
    wanted, buffers = set(), {}
    for name, layer in layers.items():
        wanted |= {
            f"{name}.{c}.{adapter_name}" for c in layer.adapter_layer_names if adapter_name in getattr(layer, c)
        }
        for container in layer.buffer_names:
            if adapter_name in getattr(layer, container):
                buffers[f"{name}.{container}.{adapter_name}"] = getattr(layer, container)[adapter_name]
    contents = _contents(config, layers, adapter_name)
    wanted |= _base_names(model, contents, layers)
    missing = sorted(name for name in wanted if name not in state_dict or state_dict[name].numel() == 0)
    if missing:
        raise RuntimeError(
            f"cannot save adapter {adapter_name!r} truly: {len(missing)} tensors are missing from the state dict, the "
            f"first {missing[0]!r}. Frozen weights that POET-X merges into must be part of it (FSDP needs "
            "SHARDED_STATE_DICT; DeepSpeed needs merge_interval=0)"
        )
    steps = {key: value for key, value in state_dict.items() if key.endswith(f"poetx_step.{adapter_name}")}
    # Copies: a tied weight or a view must not drag its storage, or an alias, into the file.
    result = {name: state_dict[name] for name in sorted(wanted)} | buffers | steps
    return result | {CONTENTS_KEY: torch.tensor(contents)}


def restore_base(
    model: nn.Module, config: PoetXConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Check an adapter file against the model and write its base tensors into the model, in place.

    Args:
        model: holds the adapter's layers already.
        config: of the adapter in the model.
        adapter_name: in the model.
        state_dict: of the file, without adapter names in its keys.

    Returns:
        What is left for the adapter itself.

    Raises:
        ValueError: if the file belongs to other settings, to another base model, or lacks base tensors.
    """
    state_dict = dict(state_dict)
    layers = _of_adapter(model, adapter_name)
    prefix = "" if any(name.startswith(_PEFT_PREFIX) for name in layers) else _PEFT_PREFIX
    contents = int(state_dict.pop(CONTENTS_KEY, torch.tensor(0)))
    for name, layer in layers.items():
        _check_settings(layer, adapter_name, state_dict.get(f"{prefix}{name}.poetx_settings"))
    expected = _base_names(model, contents, layers)
    missing = sorted(name for name in expected if f"{prefix}{name}" not in state_dict)
    if missing:
        raise ValueError(
            f"the adapter file lacks {len(missing)} base tensors that it was trained with, the first {missing[0]!r}; "
            "it is damaged, or was written by something that saves adapter tensors only"
        )
    if not contents & (BASE_WEIGHTS | WHOLE_BASE):
        _check_base(config, adapter_name, layers, state_dict, prefix)
    targets = {canonical_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    targets |= {canonical_name(name): tensor for name, tensor in model.named_buffers(remove_duplicate=False)}
    for name in expected:
        target, source = targets.get(name), state_dict[f"{prefix}{name}"]
        if target is None or target.is_meta or isinstance(target, DTensor):
            continue
        if target.shape != source.shape:
            raise ValueError(f"{name!r} has shape {list(target.shape)}, in the adapter file {list(source.shape)}")
        with torch.no_grad():
            # In place, so that ties, dtypes and requires_grad stay, also where PEFT assigns instead of copying.
            target.copy_(state_dict.pop(f"{prefix}{name}"))
    return state_dict


def _check_settings(layer: PoetXLayer, adapter_name: str, saved: Tensor | None) -> None:
    if saved is None:
        return
    names = ("block", "seed", "permutation_group")
    for name, value, wanted in zip(names, saved.tolist(), layer.poetx_settings[adapter_name].tolist(), strict=True):
        if value != wanted:
            raise ValueError(
                f"the checkpoint was trained with {name}={value}, this model has {name}={wanted}; "
                f"use PoetXConfig({name}={value}) to go on with it"
            )


def _check_base(
    config: PoetXConfig, adapter_name: str, layers: dict[str, PoetXLayer], state_dict: dict[str, Tensor], prefix: str
) -> None:
    """Refuse a base model other than the one that an adapter without base weights leans on."""
    unchecked = 0
    for name, layer in layers.items():
        if int(layer.poetx_merge_count[adapter_name]):
            raise ValueError(
                "the checkpoint is from before the first merge and holds no base weights, but this model's have been "
                "merged into since; load the base model anew, or train with load_best_model_at_end from the start"
            )
        saved = state_dict.get(f"{prefix}{name}.poetx_fingerprint")
        if saved is None or adapter_name not in layer.poetx_fingerprint:
            unchecked += 1
        elif config.check_base and int(saved) != int(layer.poetx_fingerprint[adapter_name]):
            if torch.float16 in (layer.get_base_layer().weight.dtype,):
                unchecked += 1
                continue
            raise ValueError(
                f"the adapter was trained on another base model: the weight of {layer.canonical_name!r} differs. Load "
                f"{config.base_model_name_or_path!r} as it was, or override with "
                "PeftModel.from_pretrained(model, folder, config=PoetXConfig.from_pretrained(folder, check_base=False))"
            )
    if unchecked:
        warnings.warn(
            f"the base weights of {unchecked} layers could not be compared with those the adapter was trained on "
            "(quantized, offloaded or float16)",
            stacklevel=2,
        )
