"""POET-X in TRL's trainers."""

from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_poetx import PoetXCallback, PoetXConfig
from hf_poetx.optimizer import skew_learning_rate, trainable_skew
from tests.poetx_training import assert_same_state, losses, merge_counts, tiny_llama

WORDS = "the cat sat on a mat while dogs ran far away from every small house".split()
ARGUMENTS = {
    "max_steps": 5,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 16,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def config(**options) -> PoetXConfig:
    return PoetXConfig(**{"block": 8, "merge_interval": 2, "target_modules": ["q_proj", "down_proj"]} | options)


def sft_trainer(output_dir: Path, tokenizer, **options) -> SFTTrainer:
    texts = [" ".join(WORDS[start:] + WORDS[:start]) for start in range(12)]
    return SFTTrainer(
        tiny_llama(),
        args=SFTConfig(output_dir=str(output_dir), **ARGUMENTS | options),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=config(),
    )


def test_sft_trainer_merges_and_resumes_bitwise_equal(tmp_path, tokenizer):
    whole = sft_trainer(tmp_path, tokenizer, gradient_accumulation_steps=2)
    whole.train()
    assert merge_counts(whole.model) == {2}
    (callback,) = [c for c in whole.callback_handler.callbacks if isinstance(c, PoetXCallback)]
    assert list(callback.reports) == [2, 4]
    rates = {group["initial_lr"] for group in whole.optimizer.param_groups}
    assert rates == {skew_learning_rate(1e-2, block, 0.5) for block in (8, 4)} and trainable_skew(whole.model)

    torch.manual_seed(7)
    resumed = sft_trainer(tmp_path / "resumed", tokenizer, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_state(whole.model, resumed.model)
    assert losses(resumed) == losses(whole)


def dpo_trainer(output_dir: Path, tokenizer, **poetx) -> DPOTrainer:
    rows = {
        "prompt": [WORDS[n] for n in range(6)],
        "chosen": [f" {WORDS[n + 1]} {WORDS[n + 2]}" for n in range(6)],
        "rejected": [f" {WORDS[n + 3]} {WORDS[n + 4]}" for n in range(6)],
    }
    return DPOTrainer(
        tiny_llama(),
        args=DPOConfig(output_dir=str(output_dir), **ARGUMENTS | {"save_strategy": "no", "max_steps": 2}),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=config(**poetx),
    )


def test_dpo_with_merges_raises_at_its_first_reference(tmp_path, tokenizer):
    trainer = dpo_trainer(tmp_path, tokenizer, merge_interval=200)
    with pytest.raises(ValueError, match="merge_interval=0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_dpo_without_merges_trains(tmp_path, tokenizer):
    trainer = dpo_trainer(tmp_path, tokenizer, merge_interval=0)
    trainer.train()
    assert trainer.state.global_step == 2 and losses(trainer)[1] == pytest.approx(0.6931, abs=1e-3)
    assert any(parameter.any() for parameter in trainable_skew(trainer.model))
