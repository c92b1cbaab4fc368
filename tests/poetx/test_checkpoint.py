"""Adapter files tell the whole truth: what is written comes back bit for bit by every way of loading, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from hf_poetx import PoetXConfig, get_poetx_model, merge_then_reinitialize
from hf_poetx.checkpoint import poetx_layers
from tests.poetx.helpers import (
    copies,
    family_model,
    logits,
    poetx_family,
    randomize_skew,
    save_to,
    tensors_equal,
    trained_poetx,
)

BASES = {"untied": ("Llama", torch.float32), "tied": ("Qwen2", torch.float32), "bf16": ("Llama", torch.bfloat16)}


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> dict[str, str]:
    """Base models on disk."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: save_to(family_model(*base), folder / name) for name, base in BASES.items()}


@pytest.fixture
def base_folder(bases) -> str:
    return bases["untied"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where adapters are saved."""
    return tmp_path / "adapter"


def load_base(path: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


@torch.no_grad()
def train_through(model: nn.Module, merges: int = 1) -> nn.Module:
    """What training does to a model: rotations, merges, and whatever else is trainable."""
    for merge in range(merges):
        randomize_skew(model, seed=10 + merge)
        merge_then_reinitialize(model)
    randomize_skew(model, seed=20)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "poetx" not in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def adapter(path: str, **settings: Any) -> nn.Module:
    return get_poetx_model(load_base(path), PoetXConfig(**{"block": 7, "merge_interval": 2} | settings))


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a saved adapter."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


WAYS = {
    "default": lambda base, folder: PeftModel.from_pretrained(load_base(base), folder),
    "trainable": lambda base, folder: PeftModel.from_pretrained(load_base(base), folder, is_trainable=True),
    "low-memory": lambda base, folder: PeftModel.from_pretrained(load_base(base), folder, low_cpu_mem_usage=True),
    "no-autocast": lambda base, folder: PeftModel.from_pretrained(
        load_base(base), folder, autocast_adapter_dtype=False
    ),
    "auto": lambda base, folder: AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto"),
}


@pytest.mark.parametrize("train_rest", [False, True], ids=["adapters-only", "train-rest"])
@pytest.mark.parametrize("merges", [0, 2])
@pytest.mark.parametrize("base", BASES)
def test_every_way_of_loading_gives_the_same_model_bit_for_bit(bases, folder, base, merges, train_rest):
    model = train_through(adapter(bases[base], train_rest=train_rest), merges)
    model.save_pretrained(folder)
    expected, tensors = logits(model), copies(model.state_dict())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for way, load in WAYS.items():
        loaded = load(bases[base], folder)
        assert torch.equal(logits(loaded), expected), way
        # Training goes on as if it had not stopped: counters, permutations and dtypes are the same.
        assert tensors_equal(copies(loaded.state_dict()), tensors), way
        trained = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
        of_model = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == (of_model if way == "trainable" else set())
        assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


def test_a_model_that_was_only_loaded_is_saved_again_as_it_was(base_folder, folder, tmp_path):
    train_through(adapter(base_folder, train_rest=True)).save_pretrained(folder)
    PeftModel.from_pretrained(load_base(base_folder), folder).save_pretrained(tmp_path / "again")
    files = [load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "again")]
    assert tensors_equal(*files)


def test_training_goes_on_from_a_loaded_adapter_as_from_the_live_one(base_folder, folder):
    live = train_through(adapter(base_folder))
    live.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(load_base(base_folder), folder, is_trainable=True)
    for model in (live, loaded):
        randomize_skew(model, seed=30)
        merge_then_reinitialize(model)
        randomize_skew(model, seed=31)
    assert torch.equal(logits(loaded), logits(live))


def test_pickled_files_hold_the_same(base_folder, folder):
    model = train_through(adapter(base_folder, train_rest=True))
    model.save_pretrained(folder, safe_serialization=False)
    assert (folder / "adapter_model.bin").exists()
    assert torch.equal(logits(PeftModel.from_pretrained(load_base(base_folder), folder)), logits(model))


def test_whole_state_dicts_are_exact_too(base_folder, tmp_path):
    model = train_through(adapter(base_folder, train_rest=True))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = adapter(base_folder, train_rest=True)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(logits(other), logits(model))


def test_loading_into_a_live_adapter_is_exact(base_folder, folder):
    model = train_through(adapter(base_folder, train_rest=True))
    model.save_pretrained(folder)
    other = train_through(adapter(base_folder, train_rest=True), merges=3)
    other.load_adapter(folder, "default", is_trainable=True)
    assert torch.equal(logits(other), logits(model))


def test_transformers_loads_an_adapter_folder_by_itself(folder, tmp_path):
    base = save_to(family_model("Llama"), tmp_path / "base")
    model = train_through(adapter(base))
    model.save_pretrained(folder)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


# What is in the file


def test_an_adapter_that_never_merged_holds_no_base_weights(base_folder, folder):
    train_through(adapter(base_folder), merges=0).save_pretrained(folder)
    names = load_file(folder / "adapter_model.safetensors")
    assert not any("base_layer" in name or name.endswith("embed_tokens.weight") for name in names)
    assert all("poetx_" in name for name in names)
    assert not any("default" in name for name in names)
    written = sum(tensor.numel() * tensor.element_size() for name, tensor in names.items() if "skew" in name)
    own = sum(p.numel() * 4 for n, p in trained_poetx().named_parameters() if "skew" in n)
    assert written == own


def test_a_merged_adapter_holds_the_wrapped_weights_and_no_others(base_folder, folder):
    model = train_through(adapter(base_folder))
    model.save_pretrained(folder)
    base = {name for name in load_file(folder / "adapter_model.safetensors") if "poetx_" not in name}
    assert base == {f"{name}.base_layer.weight" for name, _ in poetx_layers(model)}


def test_permutations_and_counters_are_stored_and_the_file_wins(base_folder, folder):
    model = adapter(base_folder)
    for _, layer in poetx_layers(model):
        layer.poetx_permutation_in["default"].copy_(torch.arange(layer.in_features).flip(0))
    randomize_skew(model).save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {t.dtype for n, t in tensors.items() if "permutation" in n} == {torch.int32}
    assert torch.equal(logits(PeftModel.from_pretrained(load_base(base_folder), folder)), logits(model))


# A base model that no folder holds


def test_a_model_from_scratch_stores_all_of_its_base(folder):
    base = family_model("Llama")
    base.config._name_or_path = base.name_or_path = ""
    model = train_through(get_poetx_model(base, PoetXConfig(block=7, init="normalize", train_rest=True)), merges=1)
    model.save_pretrained(folder)
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base_config"]["hidden_size"] == 24
    fresh = type(base)(type(base.config)(**{k: v for k, v in saved["base_config"].items() if k != "model_type"}))
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, folder)), logits(model))


@pytest.mark.parametrize("given", [False, True])
def test_the_base_config_of_a_model_from_scratch_names_its_class(folder, given):
    base = family_model("GPT2")
    base.config._name_or_path = base.name_or_path = ""
    assert not base.config.architectures, "only saving sets it"
    base_config = base.config.to_dict() if given else None
    model = get_poetx_model(base, PoetXConfig(block=7, base_config=base_config))
    model.save_pretrained(folder)
    saved = json.loads((folder / "adapter_config.json").read_text())["base_config"]
    assert saved["architectures"] == ["GPT2LMHeadModel"]
    assert not given or not base_config["architectures"], "the dictionary that was given stays as it was"
    assert torch.equal(logits(PeftModel.from_pretrained(family_model("GPT2", seed=9), folder)), logits(model))


def test_a_class_that_transformers_does_not_have_is_not_named(folder):
    class Own(type(family_model("Llama"))):
        pass

    base = Own(family_model("Llama").config)
    model = get_poetx_model(base, PoetXConfig(block=7))
    assert not model.peft_config["default"].base_config.get("architectures")


def test_a_model_from_scratch_is_whole_also_before_its_first_merge(folder):
    model = trained_poetx()
    model.save_pretrained(folder)
    other = family_model("Llama", seed=9)
    assert torch.equal(logits(PeftModel.from_pretrained(other, folder)), logits(model))


def test_automatic_loading_says_that_there_is_no_base_on_disk(folder):
    trained_poetx().save_pretrained(folder)
    with pytest.raises(Exception, match="no base model on disk: build it from the base_config"):
        AutoPeftModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("merges", [0, 1])
def test_normalized_weights_are_normalized_again_on_loading(base_folder, folder, merges):
    model = train_through(adapter(base_folder, init="normalize"), merges)
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(load_base(base_folder), folder)
    assert torch.equal(logits(loaded), logits(model))


def test_a_base_that_is_normalized_already_is_not_the_one_that_was_trained(base_folder, folder):
    train_through(adapter(base_folder, init="normalize"), merges=0).save_pretrained(folder)
    normalized = adapter(base_folder, init="normalize").unload()
    with pytest.raises(ValueError, match="trained on another base model"):
        PeftModel.from_pretrained(normalized, folder)


# What does not belong together


@pytest.mark.parametrize("merges", [0, 1])
def test_another_base_model_is_an_error_with_an_override(base_folder, folder, merges):
    train_through(adapter(base_folder), merges).save_pretrained(folder)
    other = load_base(base_folder)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.add_(0.1)
    with pytest.raises(ValueError, match=r"another base model: .*layers.1.mlp.up_proj.*config.check_base = False"):
        PeftModel.from_pretrained(other, folder)
    config = PoetXConfig.from_pretrained(folder)
    config.check_base = False
    assert PeftModel.from_pretrained(other.unload() if hasattr(other, "unload") else other, folder, config=config)


def test_a_base_of_other_precision_is_the_same_base(tmp_path, folder):
    base = save_to(family_model("Llama", torch.bfloat16), tmp_path / "base")
    train_through(adapter(base), merges=0).save_pretrained(folder)
    for dtype in (torch.float32, torch.float16):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), folder)


def test_a_file_that_holds_every_parameter_leans_on_no_base(base_folder, folder):
    model = train_through(adapter(base_folder, train_rest=True))
    model.save_pretrained(folder)
    other = load_base(base_folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert torch.equal(logits(PeftModel.from_pretrained(other, folder)), logits(model))


@pytest.mark.parametrize("setting", [{"block": 5}, {"seed": 3}, {"permutation_group": 3}])
def test_an_adapter_of_other_settings_is_an_error_that_names_them(base_folder, folder, setting):
    model = train_through(adapter(base_folder))
    model.save_pretrained(folder)
    other = adapter(base_folder, **setting)
    (name, value), trained = next(iter(setting.items())), getattr(model.peft_config["default"], next(iter(setting)))
    with pytest.raises(ValueError, match=rf"{name}={trained}, this model has {name}={value}"):
        other.load_adapter(folder, "default", is_trainable=True)


@pytest.mark.parametrize(
    "part",
    ["q_proj.base_layer.weight", "up_proj.poetx_skew_in", "poetx_merge_count", "poetx_permutation_out", "model.norm."],
)
def test_a_file_without_one_of_its_tensors_is_an_error_that_names_it(tmp_path, folder, part):
    base = save_to(family_model("Llama"), tmp_path / "base")
    train_through(adapter(base, train_rest=True)).save_pretrained(folder)
    removed = []

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        removed.append(next(name for name in tensors if part in name))
        del tensors[removed[0]]

    rewrite(folder, drop)
    with pytest.raises(ValueError, match=r"lacks 1 tensors that it was trained with") as raised:
        PeftModel.from_pretrained(load_base(base), folder)
    assert removed[0] in str(raised.value)


def test_a_file_that_was_cut_short_does_not_load(tmp_path, folder):
    base = save_to(family_model("Llama"), tmp_path / "base")
    train_through(adapter(base)).save_pretrained(folder)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid"):
        PeftModel.from_pretrained(load_base(base), folder)


def test_a_base_tensor_of_another_shape_is_an_error_and_changes_nothing(tmp_path, folder):
    base = save_to(family_model("Llama"), tmp_path / "base")
    train_through(adapter(base, train_rest=True)).save_pretrained(folder)
    rewrite(folder, lambda tensors: tensors.update({"base_model.model.model.norm.weight": torch.ones(3)}))
    other = adapter(base, train_rest=True)
    before = copies(other.state_dict())
    with pytest.raises(ValueError, match=r"norm.weight' has shape \[24\], in the adapter file \[3\]"):
        other.load_adapter(folder, "default", is_trainable=True)
    assert tensors_equal(copies(other.state_dict()), before)


def test_a_file_from_before_the_first_merge_does_not_go_onto_merged_weights(base_folder, folder):
    model = train_through(adapter(base_folder), merges=0)
    model.save_pretrained(folder)
    merge_then_reinitialize(model)
    with pytest.raises(ValueError, match="before the first merge"):
        model.load_adapter(folder, "default", is_trainable=True)


def test_two_adapters_of_one_model_from_scratch_load_side_by_side(tmp_path):
    base = family_model("Llama")
    base.config._name_or_path = base.name_or_path = ""
    model = get_poetx_model(base, PoetXConfig(block=7, init="normalize", merge_interval=0, init_weights=False))
    model.add_adapter("second", PoetXConfig(block=7, init="normalize", merge_interval=0, init_weights=False))
    expected = []
    for name in ("default", "second"):
        model.set_adapter(name)
        expected.append(logits(model))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(family_model("Llama", seed=9), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    for name, wanted in zip(("default", "second"), expected, strict=True):
        again.set_adapter(name)
        assert torch.equal(logits(again), wanted)
    assert not torch.equal(*expected)


def test_embeddings_resized_after_wrapping_come_back(folder):
    base = family_model("Llama")
    base.config._name_or_path = base.name_or_path = ""
    model = get_poetx_model(base, PoetXConfig(block=7, train_rest=True))
    base.resize_token_embeddings(80)
    model.save_pretrained(folder)
    saved = json.loads((folder / "adapter_config.json").read_text())["base_config"]
    assert saved["vocab_size"] == 80
    fresh = type(base)(type(base.config)(**saved))
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, folder)), logits(model))


def test_setting_an_adapter_makes_what_it_trained_in_place_trainable(base_folder, folder):
    model = adapter(base_folder, train_rest=True)
    model.save_pretrained(folder)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    again = PeftModel.from_pretrained(load_base(base_folder), folder)
    assert not any(p.requires_grad for p in again.parameters())
    again.set_adapter("default")
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained


def test_base_tensors_do_not_go_under_other_adapters(base_folder, folder):
    train_through(adapter(base_folder)).save_pretrained(folder)
    model = adapter(base_folder, merge_interval=0)
    before = logits(model)
    with pytest.raises(ValueError, match=r"under the adapters \['default'\]"):
        model.load_adapter(folder, "second")
    assert torch.equal(logits(model), before)


def test_adapters_that_never_merged_load_side_by_side(base_folder, folder):
    model = train_through(adapter(base_folder), merges=0)
    model.save_pretrained(folder)
    both = PeftModel.from_pretrained(load_base(base_folder), folder)
    for name in ("second", "third"):
        result = both.load_adapter(folder, name)
        assert not result.missing_keys and not result.unexpected_keys
        both.set_adapter(name)
        assert torch.equal(logits(both), logits(model))


def test_only_the_selected_adapter_is_saved_whatever_the_others_are_called(base_folder, folder):
    model = train_through(adapter(base_folder), merges=0)
    alone = len(get_peft_model_state_dict(model))
    for name in ("default2", "other_default", "foodefault_bar", "efaul"):
        model.add_adapter(name, PoetXConfig(block=7, merge_interval=0))
    model.save_pretrained(folder, selected_adapters=["default"])
    assert len(load_file(folder / "adapter_model.safetensors")) == alone
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    model.save_pretrained(folder)
    assert torch.equal(logits(PeftModel.from_pretrained(load_base(base_folder), folder)), logits(model))
    assert (folder / "efaul" / "adapter_model.safetensors").exists()


def test_saving_while_merged_is_refused_where_the_base_is_a_part_of_the_file(folder):
    model = trained_poetx()
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="unmerge_adapter"):
        model.save_pretrained(folder)
    assert not (folder / "adapter_model.safetensors").exists()


def test_a_state_dict_with_a_hole_is_refused(base_folder, folder):
    model = train_through(adapter(base_folder))
    state_dict = dict(model.state_dict())
    name = next(name for name in state_dict if name.endswith("v_proj.base_layer.weight"))
    state_dict[name] = state_dict[name].new_empty(0)
    with pytest.raises(RuntimeError, match=rf"1 tensors are missing.*{name}"):
        model.save_pretrained(folder, state_dict=state_dict)


def test_base_tensors_cannot_be_written_into_an_offloaded_model(tmp_path, folder):
    base = save_to(family_model("Llama"), tmp_path / "base")
    train_through(adapter(base)).save_pretrained(folder)
    offloaded = load_base(base)
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="offloaded in this model"), pytest.warns(UserWarning, match="compared"):
        PeftModel.from_pretrained(offloaded, folder)


# Wrappers that rename modules


@pytest.mark.parametrize("how", ["checkpoint_wrapper", "torch.compile"])
@pytest.mark.parametrize("merges", [0, 1])
def test_names_that_wrappers_insert_are_no_part_of_the_file(base_folder, folder, how, merges):
    def wrapped(model: nn.Module) -> nn.Module:
        layers = model.base_model.model.model.layers
        for index in range(len(layers)):
            layer = layers[index]
            layers[index] = (
                checkpoint_wrapper(layer) if how == "checkpoint_wrapper" else torch.compile(layer, backend="eager")
            )
        return model

    train_rest = bool(merges)
    model = wrapped(train_through(adapter(base_folder, train_rest=train_rest), merges))
    model.save_pretrained(folder)
    expected = copies(model.state_dict())
    assert not any("wrapped" in name or "orig_mod" in name for name in load_file(folder / "adapter_model.safetensors"))
    plain = PeftModel.from_pretrained(load_base(base_folder), folder)
    assert len(expected) == len(plain.state_dict())
    other = wrapped(adapter(base_folder, train_rest=train_rest))
    other.load_adapter(folder, "default", is_trainable=True)
    assert tensors_equal(copies(other.state_dict()), expected)
    assert torch.equal(logits(plain), logits(train_copy(plain, other)))


def train_copy(plain: nn.Module, wrapped: nn.Module) -> nn.Module:
    """The plain model with the tensors of the wrapped one, to compare outputs without compiling anything."""
    strip = ("._checkpoint_wrapped_module", "._orig_mod")
    state_dict = {name.replace(strip[0], "").replace(strip[1], ""): t for name, t in wrapped.state_dict().items()}
    plain.load_state_dict(copies(state_dict))
    return plain


def test_injected_and_wrapped_models_read_each_others_files(tmp_path):
    from peft import inject_adapter_in_model

    config = PoetXConfig(block=7, merge_interval=0)
    wrapped = trained_poetx()
    injected = inject_adapter_in_model(config, family_model("Llama"))
    assert not set_peft_model_state_dict(injected, get_peft_model_state_dict(wrapped)).unexpected_keys
    assert torch.equal(logits(injected), logits(wrapped))
    other = poetx_family()
    assert not set_peft_model_state_dict(other, get_peft_model_state_dict(injected)).unexpected_keys
    assert torch.equal(logits(other), logits(wrapped))


def test_running_statistics_of_norms_come_back_with_train_rest(tmp_path):
    def base() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    model = get_poetx_model(base(), PoetXConfig(block=8, merge_interval=0, train_rest=True, target_modules=["0"]))
    model.train()(torch.randn(32, 16) * 3 + 1)
    model.save_pretrained(tmp_path)
    x = torch.randn(5, 16)
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
