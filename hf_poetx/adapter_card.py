"""The card of an adapter, wherever PEFT, transformers and the Trainer write and push one."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import Trainer

from .card import BEGIN, END, CardFacts, hub_name, section, write_card
from .config import POETX

# What the cards that libraries write by themselves consist of.
_PLACEHOLDER = "[More Information Needed]"


def complete_adapter_card(
    model: PeftModel, folder: str | Path, title: str, more_tags: Iterable[str] = (), for_hub: bool = False
) -> None:
    """Make an adapter's ``README.md`` tell of POET-X.

    A card that is all placeholders is replaced; of any other the text is kept, but for the section that is ours. The
    metadata name the base model, also one in a folder, unless it goes to the Hub, which takes names of its own only.
    """
    file, facts = Path(folder) / "README.md", CardFacts.of_model(model, title)
    card = ModelCard.load(file, ignore_metadata_errors=True)
    tags = {tag for tag in (*(card.data.get("tags") or ()), *more_tags) if not tag.startswith("base_model:")}
    if _PLACEHOLDER in card.text:
        write_card(folder, facts)
        card = ModelCard.load(file)
    else:
        text = card.text
        if BEGIN in text:
            text = text.partition(BEGIN)[0].rstrip() + text.partition(END)[2]
        card.text = f"{text.rstrip()}\n\n{section(facts)}\n"
    card.data["library_name"] = "peft"
    card.data["tags"] = sorted({*tags, "poetx"})
    card.data.pop("base_model", None)
    base = facts.base_on_hub if for_hub else facts.base
    if base:
        card.data["base_model"] = base
    card.save(file)


def drop_local_base(folder: str | Path) -> None:
    """Leave a base model out of the metadata of a folder's card that the Hub cannot have, which it would refuse."""
    file = Path(folder) / "README.md"
    card = ModelCard.load(file, ignore_metadata_errors=True) if file.exists() else None
    if card is not None and card.data.get("base_model") and hub_name(card.data["base_model"]) is None:
        card.data.pop("base_model")
        card.save(file)


def _is_poetx(model: PeftModel) -> bool:
    return model.peft_config[model.active_adapters[0]].peft_type == POETX


def _completing_the_card(original: Callable[..., None]) -> Callable[..., None]:
    """The card that PEFT writes with every adapter."""

    @functools.wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        file = Path(output_dir) / "README.md"
        # PEFT drops the tags that are there.
        tags = ModelCard.load(file, ignore_metadata_errors=True).data.get("tags") if file.exists() else None
        original(self, output_dir)
        if _is_poetx(self):
            complete_adapter_card(self, output_dir, Path(output_dir).name, tags or ())

    return create_or_update_model_card


def _completing_the_pushed_card(original: Callable[..., Any]) -> Callable[..., Any]:
    """The card that ``model.push_to_hub`` uploads: transformers puts a general one over the one that was saved."""

    @functools.wraps(original)
    def _upload_modified_files(self: PeftModel, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        if _is_poetx(self):
            complete_adapter_card(self, working_dir, repo_id, for_hub=True)
        return original(self, working_dir, repo_id, *args, **kwargs)

    return _upload_modified_files


def _drafting_for_the_hub(original: Callable[..., None]) -> Callable[..., None]:
    """The card that the Trainer drafts for a push."""

    @functools.wraps(original)
    def create_model_card(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _prepare_push(self, self.args.output_dir)

    return create_model_card


def _pushing_checkpoints(original: Callable[..., None]) -> Callable[..., None]:
    """The checkpoints that the Trainer pushes, with the cards that were saved in them."""

    @functools.wraps(original)
    def _push_from_checkpoint(self: Trainer, checkpoint_folder: str) -> None:
        _prepare_push(self, checkpoint_folder)
        original(self, checkpoint_folder)

    return _push_from_checkpoint


def _prepare_push(trainer: Trainer, folder: str) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_world_process_zero() and isinstance(model, PeftModel) and _is_poetx(model):
        drop_local_base(folder)


def install() -> None:
    """Complete the cards of POET-X adapters wherever PEFT and transformers write them, once."""
    if hasattr(PeftModel.create_or_update_model_card, "__wrapped__"):
        return
    PeftModel.create_or_update_model_card = _completing_the_card(PeftModel.create_or_update_model_card)
    PeftModel._upload_modified_files = _completing_the_pushed_card(PeftModel._upload_modified_files)
    Trainer.create_model_card = _drafting_for_the_hub(Trainer.create_model_card)
    Trainer._push_from_checkpoint = _pushing_checkpoints(Trainer._push_from_checkpoint)
