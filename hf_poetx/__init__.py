"""POET-X as a PEFT method: train a model through orthogonal transforms around its frozen weights.

Importing it registers the method with PEFT and joins transformers' Trainer.
"""

from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method

from .adapter_card import install as install_cards
from .card import CardFacts, write_card
from .config import POETX, PoetXConfig
from .export import ExportSummary, merge_checkpoint, merge_to_checkpoint
from .model import PoetXModel, get_poetx_model
from .optimizer import add_skew_groups, create_poetx_optimizer, reset_optimizer_state
from .publish import push_folder, push_merged
from .report import OrthogonalityCallback, orthogonality_report
from .schedule import MergeReport, attach_merging, merge_step, merge_then_reinitialize
from .trainer import PoetXCallback, install

__all__ = [
    "CardFacts",
    "ExportSummary",
    "MergeReport",
    "OrthogonalityCallback",
    "PoetXCallback",
    "PoetXConfig",
    "PoetXModel",
    "add_skew_groups",
    "attach_merging",
    "create_poetx_optimizer",
    "get_poetx_model",
    "merge_checkpoint",
    "merge_step",
    "merge_then_reinitialize",
    "merge_to_checkpoint",
    "orthogonality_report",
    "push_folder",
    "push_merged",
    "reset_optimizer_state",
    "write_card",
]

if POETX not in PEFT_TYPE_TO_TUNER_MAPPING:
    register_peft_method(name="poetx", config_cls=PoetXConfig, model_cls=PoetXModel, prefix="poetx_")
install()
install_cards()
