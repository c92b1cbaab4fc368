"""Adapters on disk with transforms far from the identity, for tests of what is made of them."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from hf_poetx import PoetXConfig, get_poetx_model, merge_then_reinitialize
from tests.poetx_training import layers_of


def shake(model: nn.Module) -> None:
    """Stand for training: random skew entries (sigma about 0.3) and changes of whatever else is trained."""
    with torch.no_grad():
        skew = {parameter for layer in layers_of(model) for parameter in layer.skew_parameters("default")}
        for parameter in model.parameters():
            if parameter in skew:
                block = 1 + (2 * parameter.shape[-1]) ** 0.5
                parameter.copy_(torch.randn_like(parameter) * 0.15 / block**0.5)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def write_base(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Save a model and load it again, so that it knows where it is."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def write_adapter(model: nn.Module, folder: Path, merges: int = 0, **config: Any) -> PeftModel:
    """Wrap a model, change it as training would, with so many periodic merges, and save the adapter."""
    wrapped = get_poetx_model(model, PoetXConfig(**{"block": 8} | config))
    for _ in range(merges):
        shake(wrapped)
        merge_then_reinitialize(wrapped)
    shake(wrapped)
    wrapped.save_pretrained(folder)
    return wrapped
