"""A tiny Llama, its data and its Trainer, for tests of POET-X training."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_poetx import PoetXConfig, get_poetx_model
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.layer import PoetXLayer

VOCABULARY = 64


def tiny_llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaForCausalLM:
    """Two layers of width 32, the same for the same seed; it leaves the random state as it was."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def tiny_poetx(dtype: torch.dtype = torch.float32, model_seed: int = 0, **config: Any) -> nn.Module:
    """`tiny_llama` under an adapter of block 8 (and a last block of 4) on two linear layers of each layer, for speed.

    It merges every second step, and permutes single columns, of which there are few, unless `config` says otherwise.
    """
    defaults = {"block": 8, "merge_interval": 2, "permutation_group": 1, "target_modules": ["q_proj", "down_proj"]}
    return get_poetx_model(tiny_llama(dtype, model_seed), PoetXConfig(**defaults | config))


def token_rows(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def batches(count: int, size: int = 4) -> Iterable[dict[str, torch.Tensor]]:
    """Batches of `token_rows`, for hand-written loops."""
    rows = torch.stack([row["input_ids"] for row in token_rows(count * size)]).view(count, size, -1)
    return [{"input_ids": batch, "labels": batch} for batch in rows]


def make_trainer(
    model: nn.Module, output_dir: Path, callbacks: list[TrainerCallback] | None = None, **arguments: Any
) -> Trainer:
    """A plain Trainer: 8 steps of 4 rows at a high learning rate, logged at every step, unless told otherwise."""
    options = {key: arguments.pop(key) for key in ("optimizers", "optimizer_cls_and_kwargs") if key in arguments}
    defaults = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(output_dir), **defaults | arguments)
    rows = token_rows()
    return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks, **options)


def layers_of(model: nn.Module) -> list[PoetXLayer]:
    """The POET-X layers of a model."""
    return [layer for _, layer in poetx_layers(model)]


def merge_counts(model: nn.Module) -> set[int]:
    """Merges that the layers have seen: one number, unless something is wrong."""
    return {int(count) for layer in layers_of(model) for count in layer.poetx_merge_count.values()}


def losses(trainer: Trainer) -> dict[int, float]:
    """Logged training losses by step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    """Both models hold the same tensors, bit for bit."""
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different
