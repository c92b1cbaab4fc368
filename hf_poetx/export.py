"""From an adapter to a plain checkpoint, which loads without this package."""

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from .adapter_file import AdapterFile, fetch, plain_name
from .base_weight import full_tensor
from .checkpoint import canonical_name, poetx_layers
from .layer import SIDES, PoetXLayer
from .merge_plan import LayerError, layer_tensor, plan_from_file, plan_on_base, rotate_in_chunks
from .schedule import require_tuner
from .skeleton import drop_tied, in_original_format, save_config
from .tensor_file import PlannedTensor, parse_size, write_checkpoint

# Files that make up a tokenizer or processor; those beside the adapter replace the base model's as a whole.
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "spiece.model",
    "sentencepiece*", "*.tiktoken", "chat_template*", "additional_chat_templates", "*processor_config.json",
)  # fmt: skip
_OTHER_COMPANIONS = ("generation_config.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")


class Progress(NamedTuple):
    """Where an export is: the tensor just written, its number from 1, and how many there are."""

    name: str
    number: int
    total: int


@dataclass(frozen=True)
class ExportSummary:
    """What an export wrote.

    Attributes:
        folder: of the checkpoint.
        base: folder or repository of the base model, None for a model from scratch.
        num_parameters: in the checkpoint.
        num_bytes: of its weights.
        layers: relative rounding error of each merged layer, in the order of writing.
        unchecked: layers whose base weight could not be compared with the one that was trained on.
        adapter: what was exported, for its card; None for a live model.
    """

    folder: Path
    base: str | None
    num_parameters: int
    num_bytes: int
    layers: list[LayerError]
    unchecked: int = 0
    adapter: AdapterFile | None = field(default=None, repr=False)

    @property
    def largest_error(self) -> float:
        """Largest relative rounding error of a layer."""
        return max((layer.error for layer in self.layers), default=0.0)


def merge_checkpoint(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    check_base: bool = True,
    overwrite: bool = False,
    token: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ExportSummary:
    """Merge an adapter on disk into a checkpoint on disk, one tensor in memory at a time.

    It writes the forward pass's own effective weights ``W_eff[p_out][:, p_in] = G_out^T W' G_in^T``, computed in fp32,
    under the base model's tensor names, shapes and dtypes, with configuration, tokenizer, generation configuration and
    chat template beside them. Peak memory is about the largest layer in fp32.

    Args:
        adapter: folder that `save_pretrained` or the Trainer wrote, or a repository on the Hub.
        out: folder to write; it appears when it is whole.
        base: folder or repository of the base model; by default the one that the adapter names.
        dtype: of all floating-point tensors; by default each as in the base model.
        max_shard_size: of a file, in bytes or such as "5GB".
        check_base: refuse a base model whose weights are not those that the adapter was trained on.
        overwrite: replace an existing model in `out`.
        token: for the Hub.
        on_progress: called after every tensor.

    Raises:
        FileNotFoundError: if the adapter or the base model is not there.
        FileExistsError: if `out` exists.
        ValueError: if the adapter does not belong to the base model, is damaged, or a merged weight is NaN or infinite
            (naming the layer). Nothing is left in `out` then.

    Source: POET-X, merging.
    """
    opened, shard_size, out = AdapterFile.open(adapter, token), parse_size(max_shard_size), Path(out)
    if opened.from_scratch:
        if base is not None:
            raise ValueError(f"the adapter holds its whole model, trained from scratch; leave out base={str(base)!r}")
        base_folder, plan = None, plan_from_file(opened, dtype)
    else:
        name = base or opened.base_name
        if name is None:
            raise ValueError(f"{opened.folder} names no base model; say which with base=FOLDER_OR_REPOSITORY")
        revision = opened.config.revision if base is None else None
        base_folder = fetch(name, "*.safetensors", "base model", revision, token)
        plan = plan_on_base(opened, base_folder, dtype, check_base)
    _check_apart(out, opened.folder, base_folder)
    with whole_or_nothing(out, overwrite) as folder:
        _write(folder, plan.tensors, shard_size, on_progress)
        plan.write_config(folder)
        copy_companions(folder, [opened.folder, base_folder])
    return ExportSummary(
        folder=out,
        base=None if opened.from_scratch else str(name),
        num_parameters=sum(torch.Size(tensor.shape).numel() for tensor in plan.tensors),
        num_bytes=sum(tensor.num_bytes for tensor in plan.tensors),
        layers=plan.errors,
        unchecked=len(plan.unchecked),
        adapter=opened,
    )


def merge_to_checkpoint(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> ExportSummary:
    """Write a live model as a plain checkpoint with its active adapters merged; the model stays as it is.

    One merged layer at a time is in memory beside the model. With weights sharded over ranks call it on every rank;
    the first one writes.

    Args:
        model: from `get_poetx_model`, around a transformers model; also inside wrappers.
        folder: to write; it appears when it is whole.
        tokenizer: or processor to save beside it; by default the base model's files are copied if they are at hand.
        dtype: of all floating-point tensors; by default each as in the model.
        max_shard_size: of a file, in bytes or such as "5GB".
        overwrite: replace an existing model in `folder`.

    Raises:
        TypeError: if the model inside is not a transformers model.
        ValueError: if it has no adapter or is quantized, or a merged weight is NaN or infinite, naming the layer.
        FileExistsError: if `folder` exists.
    """
    tuner, shard_size, folder = require_tuner(model), parse_size(max_shard_size), Path(folder)
    base = tuner.model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"{type(base).__name__} is no transformers model, so there is no format to write it in")
    errors: list[LayerError] = []
    tensors = list(_live_tensors(base, dtype, errors))
    config = copy.deepcopy(base.config)
    tensors = drop_tied(tensors, base, config, _independent(base, tensors))
    tensors = in_original_format(tensors, base)
    result = ExportSummary(
        folder=folder,
        base=getattr(base, "name_or_path", None) or None,
        num_parameters=sum(torch.Size(tensor.shape).numel() for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        layers=errors,
    )
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        for tensor in tensors:
            tensor.make()
        return result
    with whole_or_nothing(folder, overwrite) as aside:
        _write(aside, tensors, shard_size, None)
        save_config(aside, config, type(base).__name__, dtype or base.dtype)
        if base.can_generate():
            base.generation_config.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        elif result.base and Path(result.base).is_dir():
            copy_companions(aside, [Path(result.base)])
    return result


def _live_tensors(base: nn.Module, dtype: torch.dtype | None, errors: list[LayerError]) -> Iterator[PlannedTensor]:
    """All tensors of a wrapped model as the plain model would hold them."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in poetx_layers(base)}
    tokens = {
        f"{canonical_name(name)}.token_adapter.base_layer.weight": module
        for name, module in base.named_modules()
        if isinstance(module, TrainableTokensWrapper)
    }
    kept = dict(_kept_of_copied(base))
    for key, value in base.state_dict().items():
        name = canonical_name(key)
        owner = next((module for module in kept if name.startswith(f"{module}.")), None)
        if owner is not None:
            if not name.startswith(f"{kept[owner]}."):
                continue
            name = owner + name.removeprefix(kept[owner])
        if ".poetx_" in name or "trainable_tokens_" in name:
            continue
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if name in layers:
            compute = _live_weight_of(layers[name])
            yield layer_tensor(plain_name(name), layers[name].canonical_name, wanted, value.shape, compute, errors)
        elif name in tokens:
            yield PlannedTensor(plain_name(name), wanted, tuple(value.shape), _patched(tokens[name], wanted))
        else:
            yield PlannedTensor(plain_name(name), wanted, tuple(value.shape), _converted(value, wanted))


def _converted(value: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: full_tensor(value.detach()).to(dtype)


def _patched(wrapper: TrainableTokensWrapper, dtype: torch.dtype) -> Callable[[], Tensor]:
    adapter = wrapper.token_adapter
    return lambda: adapter.get_merged_weights(adapter.active_adapters).detach().to(dtype)


def _live_weight_of(layer: PoetXLayer) -> Callable[[], Tensor]:
    """How to compute a layer's merged weight, in its own layout, following what its forward pass would do."""
    if layer.quantization_backend is not None:
        raise ValueError(
            f"layer {layer.canonical_name!r} is quantized, so a plain checkpoint of this model would mix formats; save "
            "the adapter and merge it into the base model without quantization: poetx merge ADAPTER OUT --base BASE"
        )

    def compute() -> Tensor:
        active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
        adapters = [name for name in active if name in layer.poetx_config]
        weight = layer.base_weight(adapters[0] if adapters else None)
        rotations = []
        for name in adapters:
            layer.check_finite(name)
            rotations.append(tuple(layer._whole_rotation(name, side) for side in SIDES))
        merged = rotate_in_chunks(weight, rotations)
        return merged.mT if layer.transposed else merged

    return compute


def _kept_of_copied(base: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules that `modules_to_save` copied, with the name of what is in use: the copy or the original."""
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            name, in_use = canonical_name(name), module.active_adapters and not module.disable_adapters
            yield name, f"{name}.modules_to_save.{module.active_adapters[0]}" if in_use else f"{name}.original_module"


def _independent(base: nn.Module, tensors: list[PlannedTensor]) -> set[str]:
    """Names of tensors that were trained in a copy, so that they are tied to nothing."""
    copied = tuple(f"{name}." for name, kept in _kept_of_copied(base) if ".modules_to_save." in kept)
    return {tensor.name for tensor in tensors if tensor.name.startswith(copied)}


def _write(
    folder: Path,
    tensors: list[PlannedTensor],
    max_shard_size: int,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    for number, tensor in enumerate(write_checkpoint(folder, tensors, max_shard_size), start=1):
        if on_progress is not None:
            on_progress(Progress(tensor.name, number, len(tensors)))


def copy_companions(folder: Path, sources: list[Path | None]) -> None:
    """Copy tokenizer, generation configuration, code and licence, each from the first source that has it.

    A tokenizer is taken whole: files of two of them are never mixed.
    """
    present = [source for source in sources if source is not None]
    for source in present:
        files = [path for pattern in _TOKENIZER_FILES for path in source.glob(pattern)]
        if files and not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
            for path in files:
                _copy(path, folder)
        for path in (path for pattern in _OTHER_COMPANIONS for path in source.glob(pattern)):
            if not (folder / path.name).exists():
                _copy(path, folder)


def _copy(path: Path, folder: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    else:
        # The cache of the Hub links to contents elsewhere.
        shutil.copyfile(path, folder / path.name)


def _check_apart(out: Path, *sources: Path | None) -> None:
    for source in sources:
        if source is not None and out.resolve() in (source.resolve(), *source.resolve().parents):
            raise ValueError(f"{out} is or contains {source}, which the merge reads; write to another folder")


@contextlib.contextmanager
def whole_or_nothing(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write to that takes the name `out` at the end of the block, and vanishes if the block fails.

    A process that was killed leaves ``OUT.incomplete`` behind, which the next attempt removes.

    Raises:
        FileExistsError: if `out` exists, unless it is empty or `overwrite` replaces a model in it.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{out} exists; choose another folder, or replace it with overwrite (--overwrite)")
        if not (out / "config.json").exists():
            raise FileExistsError(f"{out} exists and is no model folder, so it is not overwritten; choose another one")
    aside, replaced = (out.with_name(f"{out.name}.{suffix}") for suffix in ("incomplete", "replaced"))
    for leftover in (aside, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside)
        raise
    if out.exists():
        os.replace(out, replaced)
    os.replace(aside, out)
    if replaced.exists():
        shutil.rmtree(replaced)
