"""POET-X as a PEFT method: train a model through orthogonal transforms around its frozen weights."""

from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method

from .config import POETX, PoetXConfig
from .model import PoetXModel, get_poetx_model

__all__ = ["PoetXConfig", "PoetXModel", "get_poetx_model"]

if POETX not in PEFT_TYPE_TO_TUNER_MAPPING:
    register_peft_method(name="poetx", config_cls=PoetXConfig, model_cls=PoetXModel, prefix="poetx_")
