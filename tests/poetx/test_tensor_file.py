"""Safetensors files written one tensor at a time: what the format's own reader sees in them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_poetx.tensor_file import (
    DTYPES,
    PlannedTensor,
    checkpoint_tensors,
    parse_size,
    split_into_shards,
    stored_tensors,
    write_checkpoint,
)


def planned(name: str, value: torch.Tensor) -> PlannedTensor:
    return PlannedTensor(name, value.dtype, tuple(value.shape), lambda: value)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path):
    values = {name: torch.randn(3, 5).mul(9).to(dtype) for name, dtype in DTYPES.items()}
    values |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 4), "view": torch.randn(4, 6).mT[1:]}
    list(write_checkpoint(tmp_path, [planned(name, value) for name, value in values.items()], 10**6))
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert loaded[name].flatten().view(torch.uint8).equal(value.contiguous().flatten().view(torch.uint8))
    again = {name: stored.read() for name, stored in checkpoint_tensors(tmp_path).items()}
    assert all(again[name].shape == loaded[name].shape for name in loaded)


def test_values_are_aligned_to_their_dtype_whatever_lies_before_them(tmp_path: Path):
    values = {
        "odd": torch.zeros(3, dtype=torch.uint8),
        "half": torch.zeros(3).half(),
        "double": torch.zeros(2).double(),
    }
    list(write_checkpoint(tmp_path, [planned(name, value) for name, value in values.items()], 10**6))
    content = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert (8 + size) % 8 == 0
    assert all(header[name]["data_offsets"][0] % value.itemsize == 0 for name, value in values.items())


def test_shards_keep_the_order_and_the_size_but_for_a_single_larger_tensor():
    tensors = [planned(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (3, 4, 9, 1, 2, 5)]
    shards = split_into_shards(tensors, 8)
    assert [[tensor.name for tensor in shard] for shard in shards] == [["3", "4"], ["9"], ["1", "2", "5"]]


def test_an_index_names_every_tensor_and_the_total(tmp_path: Path):
    values = {f"t{number}": torch.full((8,), float(number)) for number in range(5)}
    written = list(write_checkpoint(tmp_path, [planned(name, value) for name, value in values.items()], 64))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 32 and len(written) == 5
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    assert checkpoint_tensors(tmp_path)["t3"].read().equal(values["t3"])


def test_a_tensor_that_is_not_what_was_planned_is_refused(tmp_path: Path):
    wrong = PlannedTensor("name", torch.float32, (2,), lambda: torch.zeros(3))
    with pytest.raises(ValueError, match=r"'name' was to be torch.float32 \[2\]"):
        list(write_checkpoint(tmp_path, [wrong], 100))


@pytest.mark.parametrize("size", ["much", "5XB", "0GB", "-1", ""])
def test_what_is_no_size_is_refused(size: str):
    with pytest.raises(ValueError, match="no size"):
        parse_size(size)


def test_damaged_and_missing_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        checkpoint_tensors(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(100)}, tmp_path / "model-1.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors is missing"):
        checkpoint_tensors(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(ValueError, match="lack 'b'"):
        checkpoint_tensors(tmp_path)
    content = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(content[:-50])
    with pytest.raises(ValueError, match=r"model-1\.safetensors.*cut short"):
        stored_tensors(tmp_path / "model-1.safetensors")
