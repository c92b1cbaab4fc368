"""Merged checkpoints: the adapter's function in the base model's format, in little memory, whole or not at all."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf_poetx import merge_plan
from hf_poetx.adapter_file import ADAPTER_WEIGHTS, AdapterFile
from hf_poetx.export import merge_checkpoint, merge_to_checkpoint, whole_or_nothing
from hf_poetx.tensor_file import checkpoint_tensors
from tests.poetx_adapters import write_adapter, write_base
from tests.poetx_training import VOCABULARY, make_trainer, tiny_llama

ROOT = Path(__file__).parents[2]
TOKENS = torch.arange(12)[None]


def llama(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = tiny_llama(dtype)
    if tied:
        model.config.tie_word_embeddings = True
        model = LlamaForCausalLM(model.config).to(dtype)
    return model.eval()


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()


def mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    return MixtralForCausalLM(config).eval()


def header(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of a checkpoint."""
    return {name: (stored.dtype, stored.shape) for name, stored in checkpoint_tensors(folder).items()}


def assert_loads_as(folder: Path, expected: PreTrainedModel) -> None:
    """The checkpoint loads without a word and equals a model, bit for bit."""
    loaded, info = type(expected).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    first, second = expected.state_dict(), loaded.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert torch.equal(expected.eval()(TOKENS).logits, loaded(TOKENS).logits)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "never-merged": (llama, {}),
    "merged": (llama, {"merges": 2}),
    "bf16-error-bits": (lambda: llama(dtype=torch.bfloat16), {"merges": 2, "base_error_bits": 8}),
    "tail-blocks-groups-bf16-skew": (llama, {"block": 20, "permutation_group": 4, "skew_dtype": "bfloat16"}),
    "normalized": (llama, {"init": "normalize"}),
    "normalized-bf16": (lambda: llama(dtype=torch.bfloat16), {"init": "normalize"}),
    "normalized-merged": (llama, {"init": "normalize", "merges": 1}),
    "rest-trained-tied": (lambda: llama(tied=True), {"train_rest": True}),
    "rest-trained-merged": (llama, {"train_rest": True, "merges": 1}),
    "embeddings-and-head-copied": (llama, {"modules_to_save": ["embed_tokens", "lm_head"], "merges": 1}),
    "conv1d-biases": (gpt2, {"merges": 1}),
    "conv1d-normalized": (gpt2, {"init": "normalize", "block": 6, "train_rest": True}),
    "fused-experts": (mixtral, {"merges": 1, "train_rest": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_files_and_live_model_merge_into_the_bases_format_bit_for_bit_as_merge_and_unload(case: str, tmp_path: Path):
    make, config = CASES[case]
    wrapped = write_adapter(write_base(make(), tmp_path / "base"), tmp_path / "adapter", **config)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    base_config = copy.deepcopy(wrapped.config)
    summary = merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", max_shard_size=9000)
    assert summary.unchecked == 0 and len(summary.layers) == len(AdapterFile.open(tmp_path / "adapter").layers)
    merge_to_checkpoint(wrapped, tmp_path / "live", max_shard_size=9000)
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())
    assert wrapped.config.to_dict() == base_config.to_dict(), "the live model stays as it was"
    assert header(tmp_path / "merged") == header(tmp_path / "base") == header(tmp_path / "live")
    expected = wrapped.merge_and_unload()
    for folder in ("merged", "live"):
        assert_loads_as(tmp_path / folder, expected)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_trained_copy_of_a_tied_module_ends_the_tie(module: str, tmp_path: Path):
    wrapped = write_adapter(write_base(llama(tied=True), tmp_path / "base"), tmp_path / "a", modules_to_save=[module])
    merge_checkpoint(tmp_path / "a", tmp_path / "merged")
    merge_to_checkpoint(wrapped, tmp_path / "live")
    assert wrapped.config.tie_word_embeddings
    expected = wrapped.merge_and_unload()
    for folder in ("merged", "live"):
        assert_loads_as(tmp_path / folder, expected)
        assert not json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("indices", [[1, 5], {"embed_tokens": [1, 5]}], ids=["list", "by-module"])
def test_trained_tokens_reach_embeddings_and_what_is_tied_to_them(tied: bool, indices: Any, tmp_path: Path):
    model = write_base(llama(tied=tied), tmp_path / "base")
    wrapped = write_adapter(model, tmp_path / "a", trainable_token_indices=indices).eval()
    merge_checkpoint(tmp_path / "a", tmp_path / "merged")
    merge_to_checkpoint(wrapped, tmp_path / "live")
    assert header(tmp_path / "merged") == header(tmp_path / "base") == header(tmp_path / "live")
    for folder in ("merged", "live"):
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / folder)(TOKENS).logits
        # One product with the merged weight against three: a few roundings of values of about 1.
        torch.testing.assert_close(logits, wrapped(TOKENS).logits, rtol=0, atol=1e-5)


SCRATCH = {
    "plain": (llama, {"merges": 1}),
    "tied": (lambda: llama(tied=True), {"merges": 1, "train_rest": True}),
    "tied-head-copied": (lambda: llama(tied=True), {"modules_to_save": ["lm_head"]}),
    "conv1d": (gpt2, {"train_rest": True, "init": "normalize"}),
    "fused-experts": (mixtral, {"merges": 1}),
}


@pytest.mark.parametrize("case", SCRATCH)
def test_a_model_from_scratch_needs_nothing_but_its_adapter_file(case: str, tmp_path: Path):
    make, config = SCRATCH[case]
    wrapped = write_adapter(make(), tmp_path / "adapter", **config)
    summary = merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", max_shard_size=9000)
    assert summary.base is None
    expected = wrapped.merge_and_unload()
    assert_loads_as(tmp_path / "merged", expected)
    expected.save_pretrained(tmp_path / "saved")
    assert header(tmp_path / "merged") == header(tmp_path / "saved")


def test_merged_logits_equal_the_adapters_to_rounding(tmp_path: Path):
    wrapped = write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1).eval()
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        difference = (merged(TOKENS).logits - wrapped(TOKENS).logits).norm() / wrapped(TOKENS).logits.norm()
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        moved = (base(TOKENS).logits - wrapped(TOKENS).logits).norm() / wrapped(TOKENS).logits.norm()
    # Fourteen layers of three products each, a rounding unit (6e-8) times the root of the width apart.
    assert difference < 14 * 3 * 6e-8 * 48**0.5 < moved / 1000


def test_names_without_the_models_prefix_are_kept(tmp_path: Path):
    model = write_base(gpt2(), tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    bare = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in tensors.items()}
    # The model's weights may be a view of the file.
    (tmp_path / "base/model.safetensors").unlink()
    save_file(bare, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    wrapped = write_adapter(model, tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert header(tmp_path / "merged").keys() == bare.keys()
    assert_loads_as(tmp_path / "merged", wrapped.merge_and_unload())


def test_dtype_is_written_into_tensors_and_config_and_its_rounding_is_reported(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    exact = merge_checkpoint(tmp_path / "adapter", tmp_path / "exact")
    rounded = merge_checkpoint(tmp_path / "adapter", tmp_path / "rounded", dtype=torch.bfloat16)
    assert {dtype for dtype, _ in header(tmp_path / "rounded").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "rounded/config.json").read_text())["dtype"] == "bfloat16"
    assert exact.largest_error == 0
    # Rounding to 8 bits errs by at most 2^-9 relative to each element, and by a uniform error's 1/sqrt(3) of it or so.
    assert all(2**-11 < layer.error < 2**-9 for layer in rounded.layers)


def test_chunks_change_nothing_but_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "whole")
    monkeypatch.setattr(merge_plan, "CHUNK", 100)
    merge_checkpoint(tmp_path / "adapter", tmp_path / "chunks")
    whole, chunks = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "chunks"))
    for name in whole:
        # A product of 8 terms, twice: a few rounding units of its largest term.
        torch.testing.assert_close(whole[name], chunks[name], rtol=0, atol=1e-6)


def test_resized_embeddings_set_the_vocabulary_size(tmp_path: Path):
    model = write_base(llama(tied=True), tmp_path / "base")
    model.resize_token_embeddings(VOCABULARY + 3)
    wrapped = write_adapter(model, tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert_loads_as(tmp_path / "merged", wrapped.merge_and_unload())
    assert json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"] == VOCABULARY + 3


def test_a_trainers_checkpoint_merges_and_its_output_folder_names_the_checkpoints(tmp_path: Path):
    model = write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "start", merge_interval=2)
    trainer = make_trainer(model, tmp_path / "out", max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    with pytest.raises(FileNotFoundError, match="checkpoint-3"):
        merge_checkpoint(tmp_path / "out", tmp_path / "merged")
    merge_checkpoint(tmp_path / "out/checkpoint-3", tmp_path / "merged")
    assert_loads_as(tmp_path / "merged", trainer.model.merge_and_unload())


WITHOUT_US = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_poetx":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(12)[None]).logits, sys.argv[2])
assert "hf_poetx" not in sys.modules
"""


def test_it_loads_without_this_package(tmp_path: Path):
    wrapped = write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    command = [sys.executable, "-c", WITHOUT_US, str(tmp_path / "merged"), str(tmp_path / "logits.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
    expected = wrapped.merge_and_unload().eval()(TOKENS).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=0, atol=1e-6)


PEAK = """
import re, sys
from pathlib import Path
from transformers import LlamaForCausalLM
import hf_poetx.merge_plan
from hf_poetx.export import merge_checkpoint

def most_memory():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

hf_poetx.merge_plan.CHUNK = 2**19
Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is the memory now
before = most_memory()
merge_checkpoint(sys.argv[1], sys.argv[2], max_shard_size="100MB")
print(most_memory() - before)
"""


def test_peak_memory_is_about_the_largest_layer_and_not_the_model(tmp_path: Path):
    config = tiny_llama().config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 2048, 12
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    values = torch.randn(2048 * 1024).bfloat16() / 32
    weights = {name: values[: shape.numel()].view(shape).clone() for name, shape in shapes.items()}
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path / "base")
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    write_adapter(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter", block=32)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "adapter"), str(tmp_path / "merged")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    model, layer = sum(shape.numel() for shape in shapes.values()) * 2, 2048 * 1024 * 4
    peak = int(result.stdout.split()[-1])
    # The layer in fp32, its original and its stored copy in bf16, a few chunks of a quarter; and what the allocator
    # keeps and libraries load, about 20 MB, which for layers of a real model is nothing.
    assert peak < 8 * layer < model / 2


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_interrupted_merge_leaves_nothing_and_can_be_started_again(where: str, tmp_path: Path):
    wrapped = write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")

    def interrupt(progress: Any) -> None:
        if where == "first" or progress.number == progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", on_progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    # What a killed process leaves: a folder of another name, which does not stand in the way.
    (tmp_path / "merged.incomplete").mkdir()
    (tmp_path / "merged.incomplete/model.safetensors").write_bytes(b"half")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged"]
    assert_loads_as(tmp_path / "merged", wrapped.merge_and_unload())


def test_only_a_model_folder_is_overwritten_and_only_when_asked(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with whole_or_nothing(out) as folder:
        (folder / "config.json").write_text("1")
    with pytest.raises(FileExistsError, match="--overwrite"), whole_or_nothing(out):
        pass
    with pytest.raises(KeyError), whole_or_nothing(out, overwrite=True):
        raise KeyError
    assert (out / "config.json").read_text() == "1"
    with whole_or_nothing(out, overwrite=True) as folder:
        (folder / "config.json").write_text("2")
    assert (out / "config.json").read_text() == "2"
    (out / "config.json").rename(out / "thesis.txt")
    with pytest.raises(FileExistsError, match="no model folder"), whole_or_nothing(out, overwrite=True):
        pass


def test_output_may_not_be_what_is_read(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    for out in (tmp_path / "base", tmp_path / "adapter", tmp_path):
        with pytest.raises(ValueError, match="which the merge reads"):
            merge_checkpoint(tmp_path / "adapter", out, overwrite=True)
    assert (tmp_path / "base/model.safetensors").exists()


@pytest.mark.parametrize("merges", [0, 1])
def test_another_base_model_is_refused_naming_the_layer_with_an_override(merges: int, tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=merges)
    tiny_llama(seed=7).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"another base model.*layers\.0.*--no-check-base"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "other")
    assert not (tmp_path / "merged").exists()
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "other", check_base=False)


@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_base_is_recognized_whatever_dtype_it_was_loaded_in(loaded: torch.dtype, tmp_path: Path):
    llama().save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=loaded)
    write_adapter(model, tmp_path / "adapter")
    assert merge_checkpoint(tmp_path / "adapter", tmp_path / "merged").unchecked == 0


def test_a_wider_or_missing_layer_is_refused(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    write_base(gpt2(), tmp_path / "other")
    with pytest.raises(ValueError, match=r"does not hold as such.*merge_to_checkpoint"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "other")
    config = tiny_llama().config
    config.intermediate_size *= 2
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"mlp.*trained on another model"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "wide", check_base=False)


def break_adapter(folder: Path, part: str, value: float) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    name = next(name for name in tensors if "layers.1.mlp.up_proj" in name and name.endswith(part))
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("part", "value", "dtype"),
    [("skew_in", float("nan"), None), ("base_layer.weight", float("inf"), None), ("weight", 1e6, torch.float16)],
    ids=["skew-nan", "base-infinite", "fp16-overflow"],
)
def test_nan_and_overflow_fail_naming_the_layer(part: str, value: float, dtype: torch.dtype | None, tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    break_adapter(tmp_path / "adapter", part, value)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
    assert not (tmp_path / "merged").exists() and not (tmp_path / "merged.incomplete").exists()


def test_live_nan_fails_naming_the_layer(tmp_path: Path):
    wrapped = write_adapter(llama(), tmp_path / "adapter")
    layer = wrapped.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
    layer.poetx_skew_in["default"].data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        merge_to_checkpoint(wrapped, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_file_without_its_base_weights_is_refused(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    tensors = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    save_file(kept, tmp_path / "adapter" / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the base weights of 14 layers"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")


def test_quantized_bases_and_other_methods_are_refused(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quantized"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="LORA"):
        merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")


def test_tokenizer_generation_config_and_licence_come_along_and_tokenizers_are_not_mixed(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text("base")
    GenerationConfig(temperature=0.5, do_sample=True).save_pretrained(tmp_path / "base")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "first")
    assert (tmp_path / "first/chat_template.jinja").read_text() == "base"
    assert GenerationConfig.from_pretrained(tmp_path / "first").temperature == 0.5
    assert (tmp_path / "first/LICENSE").exists() and not (tmp_path / "first/pytorch_model.bin").exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "adapter" / name).write_text("adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "second")
    assert (tmp_path / "second/tokenizer.json").read_text() == "adapter"
    assert not (tmp_path / "second/chat_template.jinja").exists()


def test_several_active_adapters_and_an_applied_merge_are_written_as_they_act(tmp_path: Path):
    model = write_base(llama(), tmp_path / "base")
    wrapped = write_adapter(model, tmp_path / "first", merge_interval=0).eval()
    wrapped.merge_adapter()
    merge_to_checkpoint(wrapped, tmp_path / "applied")
    wrapped.unmerge_adapter()
    merge_to_checkpoint(wrapped, tmp_path / "merged")
    assert header(tmp_path / "applied") == header(tmp_path / "merged")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("applied", "merged"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    wrapped.load_adapter(tmp_path / "first", "again")
    wrapped.base_model.set_adapter(["default", "again"])
    merge_to_checkpoint(wrapped, tmp_path / "both")
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "both")(TOKENS).logits
    torch.testing.assert_close(logits, wrapped(TOKENS).logits, rtol=0, atol=1e-5)


def test_weights_sharded_over_ranks_are_written_whole(tmp_path: Path):
    wrapped = write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    merge_to_checkpoint(wrapped, tmp_path / "plain")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(wrapped)
        merge_to_checkpoint(wrapped, tmp_path / "sharded")
    finally:
        torch.distributed.destroy_process_group()
    plain, sharded = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "sharded"))
    assert plain.keys() == sharded.keys() and all(torch.equal(plain[name], sharded[name]) for name in plain)


def test_a_pipeline_runs_the_merged_model_with_its_tokenizer(tmp_path: Path):
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    generate = pipeline("text-generation", model=str(tmp_path / "merged"))
    text = generate("w3 w4", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert len(text.split()) > 2


def test_adapter_on_disk_and_peft_agree_after_a_round_trip(tmp_path: Path):
    write_adapter(write_base(llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert_loads_as(tmp_path / "merged", loaded)
