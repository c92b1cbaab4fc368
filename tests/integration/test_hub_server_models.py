"""The Hub of the tests, proved with transformers: `push_to_hub`, `from_pretrained` and Trainer.

Functions without `test_` in their names run in client processes, and import there what they need.
"""

from pathlib import Path
from typing import Any

from tests.hub_client import HubClient


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def differing_tensors(model: Any, repo: str, **where: Any) -> list[str]:
    """Names of the tensors of `model` that do not come back from the Hub bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    pulled = AutoModelForCausalLM.from_pretrained(repo, **where).state_dict()
    mine = model.state_dict()
    assert mine.keys() == pulled.keys()
    return [name for name, tensor in mine.items() if not torch.equal(tensor, pulled[name])]


def push_models() -> dict[str, Any]:
    from huggingface_hub import HfApi

    model = tiny_llama()
    model.push_to_hub("alice/plain")
    model.push_to_hub("alice/sharded", max_shard_size="20KB", private=True)
    seen = {name: differing_tensors(model, f"alice/{name}") for name in ("plain", "sharded")}
    seen["shards"] = [name for name in HfApi().list_repo_files("alice/sharded") if name.endswith(".safetensors")]
    seen["private"] = HfApi().model_info("alice/sharded").private
    model.lm_head.weight.data += 1
    model.push_to_hub("alice/plain", revision="next")
    seen["next"] = differing_tensors(model, "alice/plain", revision="next")
    seen["main"] = differing_tensors(model, "alice/plain")
    return seen


def train(folder: str) -> dict[str, Any]:
    from huggingface_hub import HfApi, ModelCard
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        push_to_hub=True,
        hub_model_id="alice/trained",
        hub_strategy="checkpoint",
        hub_always_push=True,
    )
    tokens = list(range(16))
    trainer = Trainer(tiny_llama(), arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8)
    trainer.train()
    trainer.push_to_hub()
    return {
        "trained": differing_tensors(trainer.model, "alice/trained"),
        "last checkpoint": differing_tensors(trainer.model, "alice/trained", subfolder="last-checkpoint"),
        "files": HfApi().list_repo_files("alice/trained"),
        "titles": [commit.title for commit in HfApi().list_repo_commits("alice/trained")],
        "library": ModelCard.load("alice/trained").data.library_name,
    }


def push_models_and_train(folder: str) -> dict[str, Any]:
    return push_models() | train(folder)


def test_models_come_back_bit_for_bit_from_push_to_hub_and_from_trainer(run_client: HubClient, tmp_path: Path):
    seen = run_client(push_models_and_train, tmp_path / "out")
    assert seen["plain"] == seen["sharded"] == seen["next"] == []
    assert seen["main"] == ["lm_head.weight"]
    assert len(seen["shards"]) > 1 and seen["private"]
    assert seen["trained"] == seen["last checkpoint"] == []
    checkpoint = {f"last-checkpoint/{name}" for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json")}
    assert set(seen["files"]) >= {"model.safetensors", "README.md", "training_args.bin"} | checkpoint
    # A push runs beside the training: a slow one of step 2 may find the files of step 4, which then has nothing to
    # push, or see a file change while it reads it and give up, which leaves the files to step 4.
    assert "End of training" in seen["titles"]
    assert {"Training in progress, step 2", "Training in progress, step 4"} & set(seen["titles"])
    assert seen["library"] == "transformers"
