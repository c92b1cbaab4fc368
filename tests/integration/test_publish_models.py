"""Adapters and merged models on the Hub: pushed by a real client over HTTP, and back bit for bit.

Functions without `test_` in their names run in client processes, and import there what they need.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.hub_client import HubClient
from tests.hub_server import HubServer

OUT_OF_SPACE = 507
"""A status at which huggingface_hub gives up; 500 and 503 it retries by itself while it uploads."""


def failure(action: Any) -> list[Any]:
    """Name of the error that `action` raises, the HTTP status in it or its cause, and its message."""
    try:
        action()
    except Exception as error:
        chain = (error, error.__cause__, error.__context__)
        statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in chain]
        return [type(error).__name__, next(filter(None, statuses), None), str(error)]
    return [None, None, ""]


def differing(first: Any, second: Any) -> list[str]:
    """Names of tensors that differ."""
    import torch

    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def adapted(folder: str, merges: int = 1, **config: Any) -> Any:
    """A base model on the Hub, loaded from there and wrapped, with transforms far from the identity."""
    from transformers import AutoModelForCausalLM

    from tests.poetx_adapters import write_adapter
    from tests.poetx_training import tiny_llama

    tiny_llama().push_to_hub("alice/base")
    return write_adapter(AutoModelForCausalLM.from_pretrained("alice/base"), Path(folder), merges=merges, **config)


def publish(folder: str) -> dict[str, Any]:
    """Push adapter and merged model in all ways, and pull them again."""
    from huggingface_hub import HfApi, ModelCard
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_poetx import cli, merge_checkpoint, push_merged

    api, model = HfApi(), adapted(f"{folder}/adapter")
    model.push_to_hub("alice/adapter", private=True)
    base = AutoModelForCausalLM.from_pretrained("alice/base")
    seen: dict[str, Any] = {"adapter": differing(PeftModel.from_pretrained(base, "alice/adapter"), model)}
    push_merged(model, "alice/merged", private=True, max_shard_size="20KB")
    push_merged(model, "alice/merged", revision="whole")
    seen["still"] = differing(
        PeftModel.from_pretrained(base.__class__.from_pretrained("alice/base"), f"{folder}/adapter"), model
    )
    command = ["merge", "alice/adapter", f"{folder}/cli", "--push-to-hub", "alice/cli", "--revision", "next"]
    seen["command"] = cli.main([*command, "--private"])
    merge_checkpoint("alice/adapter", f"{folder}/python")
    seen["wrong token"] = failure(lambda: push_merged(model, "alice/absent", token="hf_wrong"))
    expected = model.merge_and_unload()
    places = {
        "merged": ("alice/merged", {}),
        "whole": ("alice/merged", {"revision": "whole"}),
        "cli": ("alice/cli", {"revision": "next"}),
        "python": (f"{folder}/python", {}),
    }
    for name, (place, where) in places.items():
        seen[name] = differing(AutoModelForCausalLM.from_pretrained(place, **where), expected)
    seen["private"] = [api.model_info(f"alice/{name}").private for name in ("adapter", "merged", "cli")]
    seen["files"] = {
        "merged": api.list_repo_files("alice/merged"),
        "whole": api.list_repo_files("alice/merged", revision="whole"),
        "adapter": api.list_repo_files("alice/adapter"),
        "cli on main": api.list_repo_files("alice/cli"),
    }
    cards = {name: ModelCard.load(f"alice/{name}") for name in ("adapter", "merged")}
    seen["cards"] = {name: [card.data.to_dict(), card.text] for name, card in cards.items()}
    seen["again"] = failure(lambda: push_merged(model_of_base(), "alice/base", private=True))
    seen["commits"] = len(api.list_repo_commits("alice/base"))
    return seen


def model_of_base() -> Any:
    from transformers import AutoModelForCausalLM

    from hf_poetx import PoetXConfig, get_poetx_model

    return get_poetx_model(AutoModelForCausalLM.from_pretrained("alice/base"), PoetXConfig(block=8))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a client saw in `publish`, and how weights went to the server."""
    folder = tmp_path_factory.mktemp("publish")
    with HubServer(folder / "hub") as hub:
        seen = HubClient(hub, folder / "client")(publish, folder)
        return seen | {"uploads": len(hub.calls("lfs_upload"))}


def test_adapter_and_merged_model_come_back_bit_for_bit(published: dict[str, Any]):
    assert [published[name] for name in ("adapter", "merged", "whole", "cli", "python")] == [[]] * 5
    assert published["still"] == [], "pushing a merged model leaves the model as it was"
    assert published["command"] == 0


def test_weights_go_by_lfs_in_shards_or_whole(published: dict[str, Any]):
    assert "adapter_model.safetensors" in published["files"]["adapter"]
    shards = [name for name in published["files"]["merged"] if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors.index.json" in published["files"]["merged"]
    assert "model.safetensors" in published["files"]["whole"]
    # The base, the adapter, all shards, the whole model, and the command line's, which is the same.
    assert published["uploads"] >= 3 + len(shards)


def test_private_and_revision_are_kept_to(published: dict[str, Any]):
    assert published["private"] == [True] * 3
    assert published["files"]["cli on main"] == [".gitattributes"]


def test_cards_name_the_base_and_what_was_measured(published: dict[str, Any]):
    metadata, text = published["cards"]["adapter"]
    assert metadata["base_model"] == "alice/base" and metadata["library_name"] == "peft"
    assert "poetx" in metadata["tags"] and "absorbed by the weights: 1" in text
    assert 'PeftModel.from_pretrained(base, "alice/adapter")' in text and "More Information Needed" not in text
    metadata, text = published["cards"]["merged"]
    assert metadata["base_model"] == "alice/base" and metadata["library_name"] == "transformers"
    assert 'from_pretrained("alice/merged")' in text and "rounding error of a merged weight: 0" in text


def test_a_public_repository_is_not_taken_for_a_private_one(published: dict[str, Any]):
    error, _, message = published["again"]
    assert error == "ValueError" and "is public, so nothing was uploaded" in message
    assert published["commits"] == 2, "the first commit and the base model"


def test_a_wrong_token_is_told_as_such(published: dict[str, Any]):
    error, status, message = published["wrong token"]
    assert error == "HfHubHTTPError" and status == 401 and "Invalid credentials" in message


def push_until_it_works(folder: str) -> dict[str, Any]:
    """A failing push and a second attempt."""
    import contextlib
    import io

    from huggingface_hub import HfApi
    from transformers import AutoModelForCausalLM

    from hf_poetx import cli, push_folder
    from tests.poetx_adapters import write_adapter
    from tests.poetx_training import tiny_llama

    model = write_adapter(tiny_llama(), Path(folder) / "adapter", merges=1)
    command = ["merge", f"{folder}/adapter", f"{folder}/merged", "--max-shard-size", "20KB"]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = cli.main([*command, "--push-to-hub", "alice/merged"])
    seen: dict[str, Any] = {"failed": [code, told.getvalue()]}
    seen["between"] = HfApi().list_repo_files("alice/merged")
    push_folder(f"{folder}/merged", "alice/merged")
    seen["pulled"] = differing(AutoModelForCausalLM.from_pretrained("alice/merged"), model.merge_and_unload())
    return seen


def test_a_push_that_broke_off_shows_nothing_and_goes_on_where_it_was(
    hub: HubServer, run_client: HubClient, tmp_path: Path
):
    hub.fail("lfs_upload", nth=3, status=OUT_OF_SPACE)
    seen = run_client(push_until_it_works, tmp_path)
    code, told = seen["failed"]
    assert code == 1 and "Error while uploading" in told and "hf upload alice/merged" in told
    assert seen["between"] == [".gitattributes"] and seen["pulled"] == []
    arrived = [call.path.split("/")[-1] for call in hub.calls("lfs_upload") if call.status == 200]
    assert len(arrived) == len(set(arrived)), "no weights are sent twice"
    assert len(hub.calls("commit")) == 1


def train(folder: str, strategy: str) -> dict[str, Any]:
    """Train with merges and pushes, and compare with what is on the Hub."""
    from huggingface_hub import HfApi, ModelCard
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_poetx import merge_checkpoint
    from tests.poetx_adapters import write_adapter
    from tests.poetx_training import make_trainer

    repo = f"alice/{strategy.replace('_', '-')}"
    model = write_adapter(
        AutoModelForCausalLM.from_pretrained("alice/base"), Path(folder) / f"{strategy}-start", merge_interval=2
    )
    trainer = make_trainer(
        model,
        Path(folder) / strategy,
        max_steps=3,
        save_strategy="steps",
        save_steps=2,
        push_to_hub=True,
        hub_model_id=repo,
        hub_strategy=strategy,
        hub_always_push=True,
    )
    trainer.train()
    trainer.push_to_hub()
    base = AutoModelForCausalLM.from_pretrained("alice/base")
    seen: dict[str, Any] = {"trained": differing(PeftModel.from_pretrained(base, repo), trainer.model)}
    seen["files"] = HfApi().list_repo_files(repo)
    seen["titles"] = [commit.title for commit in HfApi().list_repo_commits(repo)]
    card = ModelCard.load(repo)
    seen["card"] = [card.data.to_dict(), card.text]
    merge_checkpoint(repo, Path(folder) / f"{strategy}-merged")
    merged = AutoModelForCausalLM.from_pretrained(Path(folder) / f"{strategy}-merged")
    seen["merged"] = differing(merged, trainer.model.merge_and_unload())
    return seen


def train_with_every_strategy(folder: str) -> dict[str, Any]:
    from tests.poetx_training import tiny_llama

    tiny_llama().push_to_hub("alice/base")
    return {name: train(folder, name) for name in ("end", "every_save", "checkpoint", "all_checkpoints")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a client saw of trainings with each hub strategy."""
    folder = tmp_path_factory.mktemp("trained")
    with HubServer(folder / "hub") as hub:
        return HubClient(hub, folder / "client")(train_with_every_strategy, folder)


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_trainer_pushes_merged_into_adapters_with_every_strategy(strategy: str, trained: dict[str, Any]):
    seen = trained[strategy]
    assert seen["trained"] == seen["merged"] == []
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= set(seen["files"])
    assert not [name for name in seen["files"] if name.endswith((".partial", ".incomplete"))]
    assert ("Training in progress, step 2" in seen["titles"]) == (strategy != "end")
    assert ("last-checkpoint/adapter_model.safetensors" in seen["files"]) == (strategy == "checkpoint")
    assert ("checkpoint-2/adapter_model.safetensors" in seen["files"]) == (strategy == "all_checkpoints")
    metadata, text = seen["card"]
    assert metadata["base_model"] == "alice/base" and metadata["library_name"] == "peft"
    assert "poetx" in metadata["tags"] and "absorbed by the weights: 1" in text
    assert "learning_rate: 0.01" in text, "what the Trainer says stays"


def push_with_local_base(folder: str) -> dict[str, Any]:
    """Push an adapter on a base model in a folder, by itself and by the Trainer."""
    from huggingface_hub import ModelCard, hf_hub_download

    from tests.poetx_adapters import write_adapter, write_base
    from tests.poetx_training import make_trainer, tiny_llama

    folder = Path(folder)
    model = write_adapter(write_base(tiny_llama(), folder / "base"), folder / "adapter", merge_interval=2)
    model.push_to_hub("alice/by-itself")
    repo, options = "alice/by-trainer", {"save_strategy": "steps", "save_steps": 2, "hub_strategy": "checkpoint"}
    trainer = make_trainer(model, folder / "out", max_steps=2, push_to_hub=True, hub_model_id=repo, **options)
    trainer.train()
    trainer.push_to_hub()
    checkpoint = hf_hub_download(repo, "last-checkpoint/README.md")
    cards = [folder / "adapter/README.md", "alice/by-itself", repo, checkpoint]
    return {"bases": [ModelCard.load(card).data.base_model for card in cards], "base": str(folder / "base")}


def test_a_base_model_in_a_folder_is_named_on_disk_and_not_on_the_hub(
    hub: HubServer, run_client: HubClient, tmp_path: Path
):
    seen = run_client(push_with_local_base, tmp_path)
    assert seen["bases"] == [seen["base"], None, None, None]
