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

from .base_weight import full_tensor
from .config import PoetXConfig
from .layer import PoetXLayer

# What the wrappers of torch insert into module names.
_WRAPPER_PARTS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_PEFT_PREFIX = "base_model.model."
# What every adapter file holds for each of its layers, beside skew entries.
_STATE = ("poetx_permutation_in", "poetx_permutation_out", "poetx_merge_count", "poetx_settings")
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


def is_stacked_expert(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is the weight of all experts of a layer in one, which no linear layer holds."""
    return parameter.dim() == 3 and "expert" in name


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
        trained = parameter.is_floating_point() and not is_stacked_expert(name, parameter)
        if trained and not name.startswith(inside) and not name.startswith(copied):
            yield canonical_name(name), parameter


def _rest_buffers(model: nn.Module) -> Iterator[str]:
    """Canonical names of what training moves beside `rest_parameters`: buffers such as running means of norms."""
    wrapped = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PoetXLayer))
    copied = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, AuxiliaryTrainingWrapper))
    saved = model.state_dict().keys()
    for name, _ in model.named_buffers():
        if name in saved and not name.startswith((*wrapped, *copied)) and "poetx_" not in name:
            yield canonical_name(name)


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
        names |= {name for name, _ in rest_parameters(model)} | set(_rest_buffers(model))
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


def _adapter_names(layers: dict[str, PoetXLayer], adapter_name: str, containers: tuple[str, ...]) -> Iterator[str]:
    """Names, without the adapter's own, of what an adapter keeps in the given containers of its layers."""
    for name, layer in layers.items():
        for container in containers:
            if adapter_name in getattr(layer, container):
                yield f"{name}.{container}"


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
    if any(layer.merged for layer in layers.values()) and _contents(config, layers, adapter_name):
        raise RuntimeError(
            "merge_adapter() has written the transforms into base weights that belong to this adapter's file, and they "
            "would be applied twice when it is loaded; call unmerge_adapter() before saving"
        )
    contents = _contents(config, layers, adapter_name)
    wanted = {f"{key}.{adapter_name}" for key in _adapter_names(layers, adapter_name, PoetXLayer.adapter_layer_names)}
    wanted |= _base_names(model, contents, layers)
    buffers = {
        f"{name}.{container}.{adapter_name}": getattr(layer, container)[adapter_name]
        for name, layer in layers.items()
        for container in layer.buffer_names
        if adapter_name in getattr(layer, container)
    }
    missing = sorted(name for name in wanted if name not in state_dict or state_dict[name].numel() == 0)
    if missing:
        raise RuntimeError(
            f"cannot save adapter {adapter_name!r} truly: {len(missing)} tensors are missing from the state dict, the "
            f"first {missing[0]!r}. Frozen weights that POET-X merges into must be part of it (FSDP needs "
            "SHARDED_STATE_DICT; DeepSpeed needs merge_interval=0)"
        )
    steps = {key: value for key, value in state_dict.items() if key.endswith(f"poetx_step.{adapter_name}")}
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
        What PEFT still has to load, by names in the model's own state dict.

    Raises:
        ValueError: if the file belongs to other settings or another base model, lacks tensors, or holds base tensors
            that other adapters of the model lean on or that hold a merged adapter. Nothing is changed then.
    """
    layers = _of_adapter(model, adapter_name)
    state_dict = _named_as_in_model(state_dict, any(name.startswith(_PEFT_PREFIX) for name in layers))
    contents = int(state_dict.pop(CONTENTS_KEY, torch.tensor(0)))
    for name, layer in layers.items():
        _check_settings(layer, adapter_name, state_dict.get(f"{name}.poetx_settings"))
    expected = _base_names(model, contents, layers)
    needed = expected | set(_adapter_names(layers, adapter_name, (*PoetXLayer.adapter_layer_names, *_STATE)))
    missing = sorted(needed - set(state_dict))
    if missing:
        raise ValueError(
            f"the adapter file lacks {len(missing)} tensors that it was trained with, the first {missing[0]!r}; it is "
            "damaged, belongs to another model, or was written by something that saves a part of them only"
        )
    _check_other_adapters(model, layers, adapter_name, expected, state_dict)
    if contents and (merged := [name for name, layer in layers.items() if layer.merged]):
        raise ValueError(
            f"the adapter file holds base tensors, and the base weight of {merged[0]!r} holds a merged adapter; call "
            "unmerge_adapter() before loading"
        )
    if not contents & (BASE_WEIGHTS | WHOLE_BASE):
        _check_not_merged(layers, adapter_name)
    if not _covers_base(model, expected):
        _check_base(config, adapter_name, layers, state_dict)
    _write_base(model, expected, state_dict)
    in_model = {canonical_name(key): key for key in model.state_dict()}
    of_adapter = {name: in_model.get(f"{name}.{adapter_name}", in_model.get(name, name)) for name in state_dict}
    return {of_adapter[name]: tensor for name, tensor in state_dict.items()}


def _named_as_in_model(state_dict: dict[str, Tensor], in_peft_model: bool) -> dict[str, Tensor]:
    """A file's tensors by canonical names of the model, whether file and model are a PEFT model's or an injected one's."""
    prefix = _PEFT_PREFIX if in_peft_model else ""
    renamed = {}
    for key, value in state_dict.items():
        name = canonical_name(key)
        if name == CONTENTS_KEY or name.endswith("poetx_step"):
            # These belong to the whole model. Only a PEFT model counts steps.
            if name == CONTENTS_KEY or in_peft_model:
                renamed[name] = value
        else:
            renamed[prefix + name.removeprefix(_PEFT_PREFIX)] = value
    return renamed


def _write_base(model: nn.Module, names: set[str], state_dict: dict[str, Tensor]) -> None:
    """Take base tensors out of a file's state dict and write them into the model.

    In place, so that ties, dtypes and requires_grad stay, also where PEFT assigns instead of copying. What has no
    storage to write into, or a part of it, is left to PEFT's own loading.
    """
    targets = {canonical_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    targets |= {canonical_name(name): tensor for name, tensor in model.named_buffers(remove_duplicate=False)}
    for name in names:
        if targets[name].shape != state_dict[name].shape:
            raise ValueError(
                f"{name!r} has shape {list(targets[name].shape)}, in the adapter file {list(state_dict[name].shape)}"
            )
    offloaded = {canonical_name(name) for name, module in model.named_modules() if _is_offloaded(module)}
    for name in names:
        owner, target = name.rpartition(".")[0], targets[name]
        if owner in offloaded:
            raise ValueError(
                f"the adapter file holds the base tensor {name!r}, which is offloaded in this model and cannot be "
                "written; load the base model without offload, or export the adapter as a merged model"
            )
        if not target.is_meta and not isinstance(target, DTensor):
            with torch.no_grad():
                target.copy_(state_dict.pop(name))


def _is_offloaded(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def _covers_base(model: nn.Module, names: set[str]) -> bool:
    """Whether `names` are all of a model's base parameters, so that nothing of the base model it is loaded onto stays."""
    parameters = (canonical_name(name) for name, _ in model.named_parameters())
    return all(name in names for name in parameters if ".poetx_" not in name)


def _check_other_adapters(
    model: nn.Module, layers: dict[str, PoetXLayer], adapter_name: str, names: set[str], state_dict: dict[str, Tensor]
) -> None:
    """Refuse base tensors of a file that would change the model under other adapters."""
    others = sorted({name for layer in layers.values() for name in layer.poetx_config} - {adapter_name})
    if not others:
        return
    present = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    for name in sorted(names):
        saved, own = state_dict[name], full_tensor(present[name])
        if not torch.equal(own, saved.to(own.device, own.dtype)):
            raise ValueError(
                f"the checkpoint of adapter {adapter_name!r} holds base tensors, of which {name!r} differs from the "
                f"model's, and writing it would change the model under the adapters {others}; load it onto a base "
                "model of its own"
            )


def _check_not_merged(layers: dict[str, PoetXLayer], adapter_name: str) -> None:
    if any(int(layer.poetx_merge_count[adapter_name]) for layer in layers.values()):
        raise ValueError(
            "the checkpoint is from before the first merge and holds no base weights, but this model's have been "
            "merged into since; load the base model anew, or train with load_best_model_at_end from the start"
        )


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
    config: PoetXConfig, adapter_name: str, layers: dict[str, PoetXLayer], state_dict: dict[str, Tensor]
) -> None:
    """Refuse a base model other than the one that an adapter without base weights leans on."""
    unchecked = 0
    for name, layer in layers.items():
        saved = state_dict.get(f"{name}.poetx_fingerprint")
        present = layer.poetx_fingerprint[adapter_name] if adapter_name in layer.poetx_fingerprint else None
        if saved is None or present is None:
            unchecked += 1
        elif int(saved) == int(present) or not config.check_base:
            continue
        elif layer.get_base_layer().weight.dtype == torch.float16:
            # What float16 rounds below its range differs in bfloat16 as well.
            unchecked += 1
        else:
            raise ValueError(
                f"the adapter was trained on another base model: the weight of {layer.canonical_name!r} differs. Load "
                f"{config.base_model_name_or_path!r} as it was. To load it all the same: "
                "config = PoetXConfig.from_pretrained(folder); config.check_base = False; "
                "PeftModel.from_pretrained(model, folder, config=config)"
            )
    if unchecked:
        warnings.warn(
            f"the base weights of {unchecked} layers could not be compared with those the adapter was trained on "
            "(quantized, offloaded or float16)",
            stacklevel=2,
        )
