"""Merged models on the Hub."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import nn

from .card import CardFacts, write_card
from .export import ExportSummary, merge_to_checkpoint


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str = "Upload merged model",
) -> CommitInfo:
    """Upload a model's folder in one commit, creating repository and branch where they are missing.

    After a failure call it again: files that have arrived are not sent a second time.

    Args:
        folder: what `merge_checkpoint` wrote.
        repo_id: ``user/name``.
        private: whether a repository that is created is private; by default as the account is set.
        revision: branch to commit to.
        token: by default the one that is logged in.
        commit_message: first line of the commit.

    Raises:
        ValueError: if `private` is asked for and the repository exists and is public; nothing is uploaded then.
        huggingface_hub.errors.HfHubHTTPError: if the Hub refuses.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise ValueError(
            f"{repo_id} exists and is public, so nothing was uploaded; make it private first, or choose another"
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message)


def push_merged(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    facts: CardFacts | None = None,
) -> CommitInfo:
    """Publish a live model with its adapters merged, as a plain checkpoint with a card; the model stays as it is.

    Args:
        model: from `get_poetx_model`.
        repo_id: ``user/name``.
        private: see `push_folder`.
        revision: see `push_folder`.
        token: see `push_folder`.
        tokenizer: see `merge_to_checkpoint`.
        dtype: see `merge_to_checkpoint`.
        max_shard_size: see `merge_to_checkpoint`.
        facts: for the card; by default what the model itself says. Measured figures of the export are filled in.

    Raises:
        ValueError: see `push_folder` and `merge_to_checkpoint`.

    Example:
        ``push_merged(trainer.model, "user/model", private=True)``
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        summary = merge_to_checkpoint(model, folder, tokenizer=tokenizer, dtype=dtype, max_shard_size=max_shard_size)
        write_card(folder, _completed(facts, model, repo_id, summary))
        return push_folder(folder, repo_id, private=private, revision=revision, token=token)


def _completed(facts: CardFacts | None, model: nn.Module, repo_id: str, summary: ExportSummary) -> CardFacts:
    own = CardFacts.of_model(model, repo_id, summary)
    if facts is None:
        return own
    for name, value in vars(own).items():
        if getattr(facts, name) in (None, [], {}):
            setattr(facts, name, value)
    facts.is_adapter = False
    return facts
