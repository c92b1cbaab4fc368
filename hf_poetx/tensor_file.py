"""Safetensors files read and written one tensor at a time, so that a model larger than the memory passes through."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# Names of the file format, with what torch calls them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, not read yet."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, memory-mapped: its pages leave the memory with it. Copy it before writing into it."""
        # Opened anew for every tensor, since an open file keeps all pages that were ever read.
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.key)


class PlannedTensor(NamedTuple):
    """A tensor to be written: what the file's header must say before there is a value, and how to make the value."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file, by key, from its header alone.

    Raises:
        ValueError: if the file is damaged or holds a dtype that is not supported, naming it.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            slices = {key: opened.get_slice(key) for key in keys}
            return {
                key: StoredTensor(file, key, DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for key, part in slices.items()
            }
    except KeyError as error:
        raise ValueError(f"{file} holds tensors of dtype {error}, which cannot be merged") from None
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as safetensors ({error}); it may be cut short: fetch it again"
        ) from error


def checkpoint_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint in transformers' layout, single or sharded, in the order of its files.

    Raises:
        FileNotFoundError: if there is none, or a shard of it is missing, naming it.
    """
    if (folder / SINGLE_FILE).exists():
        return stored_tensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise FileNotFoundError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; load the model with transformers and save it with "
            "save_pretrained, which writes safetensors"
        )
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).exists():
            raise FileNotFoundError(f"{folder / shard} is missing, which {INDEX_FILE} names; fetch the model again")
        tensors |= stored_tensors(folder / shard)
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"the shards in {folder} lack {missing[0]!r}, which {INDEX_FILE} names; fetch the model again"
        )
    return tensors


def parse_size(size: int | str) -> int:
    """Bytes of a size such as "5GB" (powers of 1000), "5GiB" (powers of 1024) or 5_000_000_000.

    Raises:
        ValueError: if it is no size, or not positive.

    Example:
        >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(100)
        (5000000000, 1572864, 100)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = match and _UNITS.get(match[2].upper())
    if not unit or not (num_bytes := int(float(match[1]) * unit)):
        raise ValueError(f"{size!r} is no size; write a number and a unit, such as 5GB or 500MB")
    return num_bytes


def split_into_shards(tensors: Iterable[PlannedTensor], max_shard_size: int) -> list[list[PlannedTensor]]:
    """Divide tensors, in their order, into shards of at most so many bytes; a larger tensor has one of its own."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def write_checkpoint(folder: Path, tensors: Iterable[PlannedTensor], max_shard_size: int) -> Iterator[PlannedTensor]:
    """Write a checkpoint in transformers' layout, one tensor in memory at a time.

    Yields:
        Each tensor after it was written; the checkpoint is whole when the iterator is exhausted.
    """
    shards = split_into_shards(tensors, max_shard_size)
    if len(shards) == 1:
        yield from _write_file(folder / SINGLE_FILE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        yield from _write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, tensors: list[PlannedTensor]) -> Iterator[PlannedTensor]:
    """Header first, since its offsets follow from shapes and dtypes; then the values, wide dtypes first as aligned."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            value = tensor.make().detach().to("cpu").contiguous()
            if value.dtype != tensor.dtype or tuple(value.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"{tensor.name!r} was to be {tensor.dtype} {list(tensor.shape)} and is {value.dtype} "
                    f"{list(value.shape)}"
                )
            if value.numel():
                value.view(-1).view(torch.uint8).numpy().tofile(out)
            del value
            yield tensor
        out.flush()
        os.fsync(out.fileno())
