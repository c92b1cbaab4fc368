"""A tiny Llama and real Trainers around it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_flashoptim  # noqa: F401 - registers the optimizers


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(dtype)


def sentences(count: int = 64) -> Dataset:
    """Counting with random starts: something that can be learned."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 96, (count, 1), generator=generator)
    tokens = ((starts + torch.arange(16)) % 96).tolist()
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "flash_adamw",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def make_trainer(
    folder: Path,
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    model_init: Callable[[], Any] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **options: Any,
) -> Trainer:
    """A plain Trainer; options of TrainingArguments by keyword."""
    if model_init is None:
        model = tiny_llama(dtype) if model is None else model
    args = arguments(folder, **options)
    return Trainer(model=model, args=args, train_dataset=sentences(), model_init=model_init, callbacks=callbacks)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rates(trainer: Trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    """For test modules outside tests/flashoptim, which has it in its conftest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
