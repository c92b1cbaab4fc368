"""An adapter's folder as it lies on disk: what was trained, and what of the base model lies beside it."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft import PeftConfig
from torch import Tensor

from .checkpoint import BASE_WEIGHTS, CONTENTS_KEY, REST, WHOLE_BASE
from .config import NO_BASE_ON_DISK, POETX, PoetXConfig
from .layer import SIDES
from .ops.cayley import largest_singular_value
from .ops.rotation import Rotation
from .tensor_file import StoredTensor, stored_tensors

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"

_PEFT_PREFIX = "base_model.model."
_OWN_TENSOR = re.compile(r"(?P<layer>.+)\.(?P<part>poetx_\w+)")
_TOKEN_DELTA = ".token_adapter.trainable_tokens_delta"
# What else is worth fetching with weights: configuration, tokenizer, chat template, code, licence.
_COMPANIONS = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.md", "LICENSE*"]
_ELSEWHERE = ["original/*", "onnx/*", "consolidated*", "checkpoint-*", "last-checkpoint/*"]


class LayerFigures(NamedTuple):
    """What an adapter's file alone says of a layer; `defect` is ``2 sigma^4 - sigma^8``, see `orthogonality_report`."""

    name: str
    merges: int
    sigma: float
    defect: float


def plain_name(name: str) -> str:
    """Name of a tensor of the base model, without what PEFT's wrappers insert into it."""
    return name.removeprefix(_PEFT_PREFIX).replace(".token_adapter.base_layer", "").replace(".base_layer", "")


def fetch(name: str | Path, weights: str, what: str, revision: str | None = None, token: str | None = None) -> Path:
    """A local folder as it is, or a repository of the Hub fetched through the cache.

    Args:
        name: folder or repository.
        weights: pattern of the weight files.
        what: it is, for the error.
        revision: of the repository.
        token: for the Hub.

    Raises:
        FileNotFoundError: if it is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    patterns = [weights, f"{weights}.index.json", *_COMPANIONS]
    try:
        folder = snapshot_download(
            str(name), revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_ELSEWHERE
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise FileNotFoundError(
            f"{what} {str(name)!r} is neither a folder nor a model that the Hub gives: {error}"
        ) from error
    return Path(folder)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk, of one of three kinds: never merged, merged into base weights, or trained from scratch.

    Attributes:
        folder: with the file and its configuration.
        config: of the adapter.
        tensors: of the file, by key.
        contents: which base tensors the file must hold, as in `checkpoint`.
    """

    folder: Path
    config: PoetXConfig
    tensors: dict[str, StoredTensor]
    contents: int

    @classmethod
    def open(cls, adapter: str | Path, token: str | None = None) -> "AdapterFile":
        """Open an adapter's folder, a Trainer's checkpoint, or a repository on the Hub.

        Raises:
            FileNotFoundError: if there is no adapter, saying what is there instead.
            ValueError: if it is another method's, or the file is damaged.
        """
        folder = fetch(adapter, ADAPTER_WEIGHTS, "adapter", token=token)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / name).exists():
                raise FileNotFoundError(f"{folder} holds no {name}: {_what_it_is(folder)}")
        config = PeftConfig.from_pretrained(str(folder))
        if config.peft_type != POETX:
            raise ValueError(f"{folder} holds a {config.peft_type} adapter, not a POET-X one; merge it with PEFT")
        tensors = stored_tensors(folder / ADAPTER_WEIGHTS)
        contents = int(tensors.pop(CONTENTS_KEY).read()) if CONTENTS_KEY in tensors else 0
        opened = cls(folder, config, tensors, contents)
        opened._check_complete()
        return opened

    def _check_complete(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.folder / ADAPTER_WEIGHTS} holds no POET-X layer")
        if self.contents & (BASE_WEIGHTS | WHOLE_BASE):
            missing = [layer for layer in self.layers if f"{layer}.weight" not in self.base_tensors]
            if missing:
                raise ValueError(
                    f"the adapter file lacks the base weights of {len(missing)} layers that it was trained with, the "
                    f"first {missing[0]!r}; it is damaged, or was written by something that saves adapter tensors only"
                )

    @cached_property
    def _parts(self) -> dict[str, dict[str, StoredTensor]]:
        parts: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in self.tensors.items():
            if key.startswith(_PEFT_PREFIX) and (match := _OWN_TENSOR.fullmatch(key)):
                parts.setdefault(match["layer"].removeprefix(_PEFT_PREFIX), {})[match["part"]] = stored
        return {layer: own for layer, own in parts.items() if "poetx_merge_count" in own}

    @property
    def layers(self) -> list[str]:
        """Names of the layers, as in the base model."""
        return list(self._parts)

    @cached_property
    def base_tensors(self) -> dict[str, StoredTensor]:
        """Base tensors that lie in the file, trained or merged into, by their names in the base model."""
        return {
            plain_name(key): stored
            for key, stored in self.tensors.items()
            if key.startswith(_PEFT_PREFIX)
            and not _OWN_TENSOR.fullmatch(key)
            and _TOKEN_DELTA not in key
            and ".original_module." not in key
        }

    @cached_property
    def token_deltas(self) -> dict[str, tuple[list[int], StoredTensor]]:
        """Trained rows of embeddings, with their indices, by the name of the embedding's weight."""
        indices = self.config.trainable_token_indices
        deltas = {}
        for key, stored in self.tensors.items():
            if key.endswith(_TOKEN_DELTA):
                module = key.removeprefix(_PEFT_PREFIX).removesuffix(_TOKEN_DELTA)
                if isinstance(indices, dict):
                    rows = next(rows for name, rows in indices.items() if f".{module}".endswith(f".{name}"))
                else:
                    rows = indices
                deltas[f"{module}.weight"] = (list(rows), stored)
        return deltas

    def is_copy(self, name: str) -> bool:
        """Whether a tensor belongs to a module that `modules_to_save` copied, which ends its tie to others."""
        modules = self.config.modules_to_save or ()
        return any(f".{name.rpartition('.')[0]}.".find(f".{module}.") >= 0 for module in modules)

    @property
    def from_scratch(self) -> bool:
        """Whether the file holds a whole model, which exists nowhere else."""
        return bool(self.contents & WHOLE_BASE)

    @property
    def trains_rest(self) -> bool:
        """Whether embeddings, norms and head in the file were trained in place."""
        return bool(self.contents & (REST | WHOLE_BASE))

    @property
    def base_name(self) -> str | None:
        """Folder or repository of the base model, None for one that exists on no disk."""
        name = self.config.base_model_name_or_path
        return None if not name or name == NO_BASE_ON_DISK else name

    def merges(self, layer: str) -> int:
        """How often a layer was merged into."""
        return int(self._parts[layer]["poetx_merge_count"].read())

    def part(self, layer: str, part: str) -> Tensor | None:
        """One of a layer's own tensors, such as ``poetx_fingerprint``, or None."""
        stored = self._parts[layer].get(part)
        return None if stored is None else stored.read()

    def rotation(self, layer: str, side: str) -> Rotation | None:
        """A layer's rotation of a side, None where a single column leaves nothing to rotate.

        Raises:
            ValueError: if an entry is not finite, naming the layer.
        """
        entries, tail = self.part(layer, f"poetx_skew_{side}"), self.part(layer, f"poetx_skew_{side}_tail")
        if entries is None:
            return None
        if not all(torch.isfinite(tensor).all() for tensor in (entries, tail) if tensor is not None):
            raise ValueError(
                f"the skew entries of layer {layer!r} are NaN or infinite; go back to an earlier checkpoint"
            )
        settings = self.part(layer, "poetx_settings")
        group = self.config.permutation_group if settings is None else int(settings[2])
        return Rotation(entries, tail, self.part(layer, f"poetx_permutation_{side}"), group)

    def figures(self) -> list[LayerFigures]:
        """Merges, sigma and defect of every layer, without the weights."""
        result = []
        for layer in self.layers:
            rotations = [rotation for side in SIDES if (rotation := self.rotation(layer, side)) is not None]
            entries = [e for rotation in rotations for e in (rotation.entries, rotation.tail) if e is not None]
            sigma = max((largest_singular_value(e).max().item() for e in entries), default=0.0)
            result.append(LayerFigures(layer, self.merges(layer), sigma, 2 * sigma**4 - sigma**8))
        return result


def _what_it_is(folder: Path) -> str:
    """What a folder without an adapter seems to be, and what to give instead."""
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*") if (path / ADAPTER_CONFIG).exists())
    if checkpoints:
        return f"it is a Trainer's output folder; name a checkpoint in it, {', '.join(checkpoints)}"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    if inside:
        return f"name one of the adapters in it, {', '.join(str(folder / name) for name in inside)}"
    if any(folder.glob("pytorch_model_fsdp*")):
        return "it is a sharded checkpoint; resume from it and save the adapter with model.save_pretrained"
    if (folder / "adapter_model.bin").exists():
        return "the adapter was saved as a pickle; save it again with safe_serialization=True"
    if (folder / "config.json").exists():
        return "it is a whole model, without an adapter"
    return "give the folder that save_pretrained or the Trainer wrote"
