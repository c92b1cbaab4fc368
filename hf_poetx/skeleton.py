"""A model's structure without its weights, and what it says of checkpoints: names in memory and on disk, ties, format."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from .config import PoetXConfig
from .tensor_file import PlannedTensor

# What PEFT's task types mean, for a model that names no class.
_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_LIVE = "merge the model while it is in memory, with hf_poetx.merge_to_checkpoint"


def skeleton_of(config: PreTrainedConfig, class_name: str) -> PreTrainedModel:
    """A model of shapes alone, of a class of transformers by its name.

    Raises:
        ValueError: for a class that transformers does not have, or cannot build.
    """
    cls = getattr(transformers, class_name, None)
    if cls is None:
        raise ValueError(f"transformers {transformers.__version__} has no {class_name!r}; {_LIVE}")
    try:
        with torch.device("meta"):
            return cls.from_config(config) if class_name.startswith("AutoModel") else cls(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"transformers cannot build a {class_name} of that configuration ({error}); {_LIVE}"
        ) from error


def skeleton_of_base(folder: Path, adapter: PoetXConfig) -> PreTrainedModel:
    """The skeleton of the base model in a folder, of the class that the adapter was trained with if it names one."""
    config = AutoConfig.from_pretrained(folder)
    for name in ((adapter.auto_mapping or {}).get("base_model_class"), *(config.architectures or ())):
        if getattr(getattr(transformers, str(name), None), "config_class", None) is type(config):
            return skeleton_of(config, name)
    return skeleton_of(config, (config.architectures or ["AutoModelForCausalLM"])[0])


def skeleton_of_adapter(config: PoetXConfig) -> PreTrainedModel:
    """The skeleton of a model that was trained from scratch, by the configuration that its adapter keeps."""
    model_type = config.base_config.get("model_type")
    try:
        base_config = AutoConfig.for_model(**config.base_config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"transformers cannot build a model of type {model_type!r} ({error}); {_LIVE}") from error
    return skeleton_of(base_config, _class_name(config))


def _class_name(config: PoetXConfig) -> str:
    known = config.base_config.get("architectures")
    if known:
        return known[0]
    if config.auto_mapping:
        return config.auto_mapping["base_model_class"]
    return _AUTO_CLASSES.get(str(config.task_type), "AutoModelForCausalLM")


def names_in_memory(skeleton: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """What the tensors of a checkpoint are called in the model that loads it, by their names on disk.

    Most are called the same. Tensors that are fused or split on loading are left out.
    """
    conversions = get_model_conversion_mapping(skeleton)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    present = skeleton.state_dict()
    result = {}
    for name in names:
        renamed, fused = rename_source_key(name, renamings, converters, skeleton.base_model_prefix, present)
        if fused is None:
            result[name] = renamed
    return result


def drop_tied(
    tensors: list[PlannedTensor], model: PreTrainedModel, config: Any, independent: set[str]
) -> list[PlannedTensor]:
    """Leave out tensors that are tied to others, or end the tie in `config` where one of the two is `independent`."""
    names = {tensor.name for tensor in tensors}
    dropped = set()
    for target, source in model.all_tied_weights_keys.items():
        if target in independent or source in independent:
            config.tie_word_embeddings = False
        elif source in names:
            dropped.add(target)
    return [tensor for tensor in tensors if tensor.name not in dropped]


def in_original_format(tensors: list[PlannedTensor], model: PreTrainedModel) -> list[PlannedTensor]:
    """The tensors as checkpoints of this architecture hold them on disk, where that differs from memory.

    For most architectures it does not, and nothing is computed. Where modules are fused in memory the conversion needs
    all tensors at once.
    """
    shapes = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors}
    if revert_weight_conversion(model, dict(shapes)).keys() == shapes.keys():
        return tensors
    converted = revert_weight_conversion(model, {tensor.name: tensor.make() for tensor in tensors})
    return [
        PlannedTensor(name, value.dtype, tuple(value.shape), lambda value=value: value)
        for name, value in converted.items()
    ]


def save_config(folder: Path, config: Any, architecture: str, dtype: torch.dtype) -> None:
    """Write ``config.json`` of a model, naming its class and dtype."""
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [architecture], dtype
    config.save_pretrained(folder)
