"""Which tensor of a merged checkpoint comes from where: the base model's files, the adapter's file, or a computation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .adapter_file import AdapterFile
from .base_weight import fingerprint, join_error_bits, row_normalize_
from .layer import SIDES
from .ops.rotation import Rotation
from .rotation import rotated_weight
from .skeleton import (
    drop_tied,
    in_original_format,
    names_in_memory,
    save_config,
    skeleton_of_adapter,
    skeleton_of_base,
)
from .tensor_file import PlannedTensor, StoredTensor, checkpoint_tensors

# Elements that are rotated at a time: temporaries stay small beside a large layer.
CHUNK = 2**24


class LayerError(NamedTuple):
    """Relative error, in the Frobenius norm, of a merged weight as stored against its value in fp32."""

    name: str
    error: float


@dataclass(frozen=True)
class MergePlan:
    """All tensors of the checkpoint, its configuration, and what making the tensors found out.

    Attributes:
        tensors: in the order of writing.
        write_config: writes ``config.json`` and what belongs to it into a folder.
        errors: filled as layers are made.
        weights: of the layers, by name.
        unchecked: layers, filled as they are made, whose base weight could not be compared.
    """

    tensors: list[PlannedTensor]
    write_config: Callable[[Path], None]
    errors: list[LayerError]
    weights: dict[str, "LayerWeight"]
    unchecked: list[str] = field(default_factory=list)


@torch.no_grad()
def rotate_in_chunks(weight: Tensor, rotations: Sequence[tuple[Rotation | None, Rotation | None]]) -> Tensor:
    """`rotated_weight` for one pair of rotations after the other, with little memory beside the result.

    Rows are independent of each other on the input side and columns on the output side, so each is done in chunks.

    Args:
        weight: ``[out_features, in_features]``.
        rotations: of the input and output side.

    Returns:
        ``[out_features, in_features]`` fp32 (fp64 for an fp64 weight), a copy.
    """
    result = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32, copy=True)
    for rotation_in, rotation_out in rotations:
        if rotation_in is not None:
            for rows in result.split(max(1, CHUNK // result.shape[1])):
                rows.copy_(rotated_weight(rows, rotation_in, None, exact=False))
        if rotation_out is not None:
            for columns in result.split(max(1, CHUNK // result.shape[0]), dim=1):
                columns.copy_(rotated_weight(columns, None, rotation_out, exact=False))
    return result


def rounding_error(exact: Tensor, stored: Tensor) -> float:
    """``|stored - exact| / |exact|`` in the Frobenius norm, 0 for a zero weight; sums in fp64."""
    difference = norm = 0.0
    rows = max(1, CHUNK // max(1, exact[0].numel()))
    for before, after in zip(exact.split(rows), stored.split(rows), strict=True):
        difference += (after.to(before.dtype) - before).square_().sum(dtype=torch.float64).item()
        norm += before.square().sum(dtype=torch.float64).item()
    return (difference / norm) ** 0.5 if norm else 0.0


def layer_tensor(
    name: str,
    layer: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    compute: Callable[[], Tensor],
    errors: list[LayerError],
) -> PlannedTensor:
    """A merged layer's tensor, whose rounding error is noted when it is made.

    Making it raises ValueError, naming the layer, if a value is NaN or infinite or leaves the range of `dtype`.
    """

    def make() -> Tensor:
        exact = compute()
        stored = exact.to(dtype)
        _check_finite(stored, f"the merged weight of layer {layer!r}", dtype)
        errors.append(LayerError(layer, rounding_error(exact, stored)))
        return stored

    return PlannedTensor(name, dtype, tuple(shape), make)


def _check_finite(value: Tensor, what: str, dtype: torch.dtype) -> None:
    if value.is_floating_point() and not all(torch.isfinite(part).all() for part in value.reshape(-1).split(CHUNK)):
        raise ValueError(
            f"{what} is NaN or infinite as {str(dtype).removeprefix('torch.')}; nothing was written. Go back to an "
            "earlier checkpoint, or choose a wider dtype"
        )


def _wanted(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype


def _passed_on(name: str, stored: StoredTensor, dtype: torch.dtype, trained: bool) -> PlannedTensor:
    """A tensor that is written as it is, but for its dtype."""

    def make() -> Tensor:
        value = stored.read().to(dtype)
        if trained or value.dtype != stored.dtype:
            _check_finite(value, f"tensor {name!r}", dtype)
        return value

    return PlannedTensor(name, dtype, stored.shape, make)


def _patched(name: str, stored: StoredTensor, delta: tuple[list[int], StoredTensor], dtype: torch.dtype):
    """An embedding of which some rows were trained."""
    rows, new = delta

    def make() -> Tensor:
        value = stored.read().to(dtype, copy=True)
        value[torch.tensor(rows)] = new.read().to(dtype)
        _check_finite(value, f"tensor {name!r}", dtype)
        return value

    return PlannedTensor(name, dtype, stored.shape, make)


class LayerWeight(NamedTuple):
    """A layer's weight on disk: the adapter's own, if it was merged into, or the base model's.

    `transposed` says that it is ``[in_features, out_features]``, as in `Conv1D`.
    """

    adapter: AdapterFile
    layer: str
    own: StoredTensor | None
    base: StoredTensor | None
    transposed: bool

    def frozen(self) -> Tensor:
        """The weight between the rotations, ``[out_features, in_features]``."""
        weight = (self.own or self.base).read()
        if self.own is None and self.adapter.config.init == "normalize":
            weight = weight.clone()
            row_normalize_(weight, self.transposed)
        error_bits = self.adapter.part(self.layer, "poetx_error_bits")
        if error_bits is not None:
            weight = join_error_bits(weight.to(torch.bfloat16), error_bits)
        return weight.mT if self.transposed else weight

    def effective(self) -> Tensor:
        """The forward pass's own weight, fp32, in the layout on disk."""
        weight = self.frozen()
        rotations = tuple(self.adapter.rotation(self.layer, side) for side in SIDES)
        _check_widths(self.layer, weight, rotations)
        merged = rotate_in_chunks(weight, [rotations])
        return merged.mT if self.transposed else merged


def _check_widths(layer: str, weight: Tensor, rotations: tuple[Rotation | None, ...]) -> None:
    for rotation, width in zip(rotations, reversed(weight.shape), strict=True):
        if rotation is not None and rotation.permutation.numel() != width:
            raise ValueError(
                f"layer {layer!r} is {list(weight.shape)} in the base model, but the adapter rotates "
                f"{rotation.permutation.numel()} features; it was trained on another model"
            )


def plan_from_file(adapter: AdapterFile, dtype: torch.dtype | None) -> MergePlan:
    """The plan for a model that was trained from scratch, which lies in the adapter's file whole."""
    skeleton = skeleton_of_adapter(adapter.config)
    errors: list[LayerError] = []
    weights: dict[str, LayerWeight] = {}
    tensors, layers = [], {f"{layer}.weight": layer for layer in adapter.layers}
    for name, stored in adapter.base_tensors.items():
        wanted = _wanted(stored, dtype)
        if name in layers:
            transposed = isinstance(skeleton.get_submodule(layers[name]), Conv1D)
            weight = weights[layers[name]] = LayerWeight(adapter, layers[name], stored, None, transposed)
            tensors.append(layer_tensor(name, weight.layer, wanted, stored.shape, weight.effective, errors))
        elif name in adapter.token_deltas:
            tensors.append(_patched(name, stored, adapter.token_deltas[name], wanted))
        else:
            tensors.append(_passed_on(name, stored, wanted, trained=True))
    _check_covers(adapter, skeleton, {tensor.name for tensor in tensors})
    independent = {name for name in adapter.base_tensors if adapter.is_copy(name)}
    tensors = drop_tied(tensors, skeleton, skeleton.config, independent)
    tensors = in_original_format(tensors, skeleton)
    main_dtype = next(tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)

    def write_config(folder: Path) -> None:
        save_config(folder, skeleton.config, type(skeleton).__name__, main_dtype)
        if skeleton.can_generate():
            skeleton.generation_config.save_pretrained(folder)

    return MergePlan(tensors, write_config, errors, weights)


def _check_covers(adapter: AdapterFile, skeleton: PreTrainedModel, names: set[str]) -> None:
    missing = sorted(skeleton.state_dict().keys() - names - skeleton.all_tied_weights_keys.keys())
    if missing:
        raise ValueError(
            f"{adapter.folder} was trained from scratch, but its file lacks {missing[0]!r} of the model that its "
            "base_config describes; it is damaged"
        )


def plan_on_base(adapter: AdapterFile, folder: Path, dtype: torch.dtype | None, check_base: bool) -> MergePlan:
    """The plan for an adapter on a base model: the base's tensors under its names, merged or replaced where trained.

    Raises:
        ValueError: if the base model is quantized, or lacks what the adapter has trained.
    """
    return _OnBase(adapter, folder, dtype, check_base).plan()


class _OnBase:
    """Working state of `plan_on_base`."""

    def __init__(self, adapter: AdapterFile, folder: Path, dtype: torch.dtype | None, check_base: bool) -> None:
        self.adapter, self.folder, self.dtype, self.check_base = adapter, folder, dtype, check_base
        self.config = json.loads((folder / "config.json").read_text())
        if "quantization_config" in self.config:
            raise ValueError(
                f"the base model in {folder} is quantized; merge into the one without quantization: --base BASE"
            )
        self.skeleton = skeleton_of_base(folder, adapter.config)
        self.stored = checkpoint_tensors(folder)
        self.memory_names = names_in_memory(self.skeleton, self.stored)
        self.on_disk = {memory: disk for disk, memory in self.memory_names.items()}
        self.layers = {f"{layer}.weight": layer for layer in adapter.layers}
        self.trained = {name: value for name, value in adapter.base_tensors.items() if name not in self.layers}
        self.deltas = dict(adapter.token_deltas)
        self.errors: list[LayerError] = []
        self.weights: dict[str, LayerWeight] = {}
        self.unchecked: list[str] = []
        self.edits: dict[str, Any] = {}

    def plan(self) -> MergePlan:
        untied = self._settle_ties()
        self._check_known()
        tensors = [self._planned(disk, self.stored[disk]) for disk in self.stored]
        tensors += [self._planned(name, source) for name, source in untied.items()]
        if self.dtype is not None:
            name = "torch_dtype" if "torch_dtype" in self.config else "dtype"
            self.edits[name] = str(self.dtype).removeprefix("torch.")
        return MergePlan(tensors, self._write_config, self.errors, self.weights, self.unchecked)

    def _settle_ties(self) -> dict[str, StoredTensor]:
        """Let what was trained in place reach the tensors that are tied to it.

        Returns:
            Tensors that the base model does not hold since they were tied, and that must be written now because
            `modules_to_save` trained a copy of one of the two, by name in memory.
        """
        untied = {}
        for target, source in self.skeleton.all_tied_weights_keys.items():
            pair = (target, source)
            if any(name in self.trained and self.adapter.is_copy(name) for name in pair):
                self.edits["tie_word_embeddings"] = False
                shared = next(self.stored[self.on_disk[name]] for name in pair if name in self.on_disk)
                untied |= {name: shared for name in pair if name not in self.on_disk}
                continue
            for values in (self.trained, self.deltas):
                for name, other in (pair, pair[::-1]):
                    if name in values:
                        values.setdefault(other, values[name])
        return untied

    def _check_known(self) -> None:
        tied = self.skeleton.all_tied_weights_keys
        known = set(self.on_disk) | set(self.skeleton.state_dict().keys() & set(tied) | set(tied.values()))
        unknown = sorted((set(self.layers) | set(self.trained) | set(self.deltas)) - known)
        if unknown:
            raise ValueError(
                f"the adapter has trained {unknown[0]!r}, and {len(unknown) - 1} more tensors, that the base model in "
                f"{self.folder} does not hold as such: it is another model, or its file format fuses them. Merge while "
                "the model is in memory, with hf_poetx.merge_to_checkpoint"
            )

    def _planned(self, name: str, stored: StoredTensor) -> PlannedTensor:
        memory = self.memory_names.get(name, name)
        wanted = _wanted(stored, self.dtype)
        if memory in self.layers:
            return self._layer(name, self.layers[memory], stored, wanted)
        source = self.trained.get(memory, stored)
        if source.shape != stored.shape:
            self._note_resized(memory, stored.shape, source.shape)
        if memory in self.deltas:
            return _patched(name, source, self.deltas[memory], wanted)
        return _passed_on(name, source, wanted, trained=source is not stored)

    def _layer(self, name: str, layer: str, stored: StoredTensor, wanted: torch.dtype) -> PlannedTensor:
        own = self.adapter.base_tensors.get(f"{layer}.weight")
        transposed = isinstance(self.skeleton.get_submodule(layer), Conv1D)
        weight = self.weights[layer] = LayerWeight(self.adapter, layer, own, stored, transposed)

        def compute() -> Tensor:
            self._check_fingerprint(layer, stored)
            return weight.effective()

        return layer_tensor(name, layer, wanted, stored.shape, compute, self.errors)

    def _check_fingerprint(self, layer: str, stored: StoredTensor) -> None:
        """Compare the base weight on disk with the one that was trained on, in any dtype it may have been loaded in."""
        expected = self.adapter.part(layer, "poetx_fingerprint")
        if expected is None:
            self.unchecked.append(layer)
        if expected is None or not self.check_base:
            return
        weight, expected = stored.read(), int(expected)
        # In float16 it was rounded twice.
        if int(fingerprint(weight)) != expected and int(fingerprint(weight.half())) != expected:
            raise ValueError(
                f"the adapter was trained on another base model: the weight of layer {layer!r} in {self.folder} differs "
                f"from that of {self.adapter.base_name!r} at the time. Name the right one with --base, or override with "
                "check_base=False (--no-check-base)"
            )

    def _note_resized(self, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        if before[1:] != after[1:] or self.config.get("vocab_size") != before[0]:
            raise ValueError(
                f"{name!r} is {list(before)} in the base model and {list(after)} in the adapter file; they do not "
                "belong together"
            )
        self.edits["vocab_size"] = after[0]

    def _write_config(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.config | self.edits, indent=2) + "\n")
