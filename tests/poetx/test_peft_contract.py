"""What every method of PEFT promises: adapters added, switched, disabled, merged, unloaded and deleted."""

import copy
import pickle

import pytest
import torch
from peft import PeftModel, PeftType, get_peft_model, inject_adapter_in_model, prepare_model_for_kbit_training
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForCausalLM

from hf_poetx import PoetXConfig, PoetXModel, get_poetx_model, merge_then_reinitialize
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.layer import PoetXLayer
from tests.poetx.helpers import (
    copies,
    family_model,
    logits,
    poetx_family,
    randomize_skew,
    save_to,
    tensors_equal,
    tokens,
    train_step,
    trained_poetx,
    unchanged,
)

CONFIG = {"block": 8, "merge_interval": 0}


def config(**settings) -> PoetXConfig:
    return PoetXConfig(**CONFIG | settings)


def two_adapters(**second):
    """A Llama under adapters "default" (active) and "other", both with rotations of their own."""
    model = get_poetx_model(family_model("Llama"), config())
    model.add_adapter("other", config(**second))
    randomize_skew(model, adapter_name="default", seed=1)
    return randomize_skew(model, adapter_name="other", seed=2)


def base_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return copies({name: layer.get_base_layer().weight for name, layer in poetx_layers(model)})


def test_method_is_registered_with_peft():
    model = get_peft_model(family_model("Llama"), config())
    assert isinstance(model, PeftModel) and isinstance(model.base_model, PoetXModel)
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.POETX] is PoetXModel
    assert model.base_model.prefix == "poetx_"
    assert all(hasattr(model, name) for name in ("save_pretrained", "from_pretrained", "push_to_hub"))


def test_adapter_name_is_in_the_parameter_names():
    model = get_poetx_model(family_model("Llama"), config(), adapter_name="test-adapter")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(name.endswith(".test-adapter") and "poetx_" in name for name in trained)


def test_an_adapter_name_inside_the_prefix_is_refused():
    with pytest.raises(ValueError, match=r"'poet' is part of the parameter prefix 'poetx_'"):
        get_poetx_model(family_model("Llama"), config(), adapter_name="poet")
    model = poetx_family()
    with pytest.raises(ValueError, match="part of the parameter prefix"):
        model.add_adapter("x", config())
    assert set(model.peft_config) == {"default"}


@pytest.mark.parametrize("name", ["weight", "base_layer", "norm"])
def test_an_adapter_called_like_a_part_of_base_names_is_saved_and_loaded(tmp_path, name):
    model = randomize_skew(get_poetx_model(family_model("Llama"), config(train_rest=True), adapter_name=name))
    merge_then_reinitialize(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(family_model("Llama"), tmp_path / name)
    assert torch.equal(logits(loaded), logits(model))


# Adding, switching, disabling, deleting


def test_switching_adapters_switches_outputs_and_trainability():
    model = two_adapters()
    first = logits(model)
    model.set_adapter("other")
    second = logits(model)
    assert not torch.allclose(first, second, atol=1e-3)
    assert all(p.requires_grad == n.endswith(".other") for n, p in model.named_parameters() if "poetx_skew" in n)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_an_added_adapter_is_inactive_frozen_and_changes_nothing():
    model = trained_poetx()
    before = logits(model)
    model.add_adapter("other", config(seed=1))
    assert model.active_adapters == ["default"]
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.endswith(".other"))
    assert torch.equal(logits(model), before)


def test_every_container_of_one_adapter_holds_the_other():
    model = two_adapters()
    containers = [m for m in model.modules() if isinstance(m, nn.ParameterDict | BufferDict)]
    assert sum("default" in c for c in containers) == sum("other" in c for c in containers) > 0


def test_disabled_adapter_gives_base_outputs_and_comes_back():
    base = logits(family_model("Llama"))
    model = trained_poetx()
    adapted = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
        with model.disable_adapter():
            assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), adapted)


def test_disabling_a_merged_adapter_gives_base_outputs_bit_for_bit():
    base = logits(family_model("Llama"))
    model = trained_poetx()
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_a_merging_clock_refuses_disabling_and_names_the_setting():
    model = poetx_family(merge_interval=5)
    model.base_model.clock = "merge_step"
    with pytest.raises(ValueError, match="merge_interval=0"), model.disable_adapter():
        pass


@pytest.mark.parametrize("active", [True, False])
def test_deleting_an_adapter_leaves_nothing_of_it(active):
    model = two_adapters()
    before = logits(model)
    if active:
        model.set_adapter("other")
    model.delete_adapter("other")
    assert set(model.peft_config) == {"default"} and model.active_adapters == ["default"]
    assert not any("other" in name for name in model.state_dict())
    for _, layer in poetx_layers(model):
        for name in layer.adapter_layer_names + layer.other_param_names:
            assert "other" not in getattr(layer, name)
    assert torch.equal(logits(model), before)


def test_the_last_adapter_can_be_deleted():
    model = trained_poetx()
    model.delete_adapter("default")
    assert model.active_adapters == [] and not model.peft_config
    assert torch.equal(logits(model.base_model), logits(family_model("Llama")))


def test_deleting_an_unknown_adapter_is_an_error():
    with pytest.raises(ValueError, match="Adapter unknown does not exist"):
        poetx_family().delete_adapter("unknown")


def test_several_active_adapters_act_like_merges_in_their_order():
    model = two_adapters(block=5)
    model.base_model.set_adapter(["other", "default"])
    together = logits(model)
    merged = logits(model.merge_and_unload(adapter_names=["other", "default"]))
    # fp32 rounding of two layers' worth of products, on outputs of the size of ten.
    assert (together - merged).abs().max() <= 1e-4


def test_adapters_on_different_layers_work_side_by_side():
    model = get_poetx_model(family_model("Llama"), config(target_modules=["q_proj"]))
    model.add_adapter("other", config(target_modules=["up_proj"]))
    randomize_skew(model)
    model.base_model.set_adapter(["default", "other"])
    assert not torch.allclose(logits(model), logits(family_model("Llama")), atol=1e-3)
    model.set_adapter("other")
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(family_model("Llama")))


def test_a_batch_that_mixes_adapters_is_refused():
    model = two_adapters()
    with pytest.raises(ValueError, match=r"adapter_names|mix adapters"):
        model(input_ids=tokens(), adapter_names=["default", "other"])


def test_weighted_adapters_are_not_offered():
    with pytest.raises(AttributeError):
        two_adapters().add_weighted_adapter(["default", "other"], [0.5, 0.5], "sum")


def test_conversion_to_lora_is_not_offered():
    assert not poetx_family().supports_lora_conversion()


def test_a_second_adapter_after_merges_is_refused():
    model = trained_poetx(merge_interval=2)
    merge_then_reinitialize(model)
    with pytest.raises(ValueError, match=r"absorbed merges.*merge_interval=0"):
        model.add_adapter("other", config())
    assert set(model.peft_config) == {"default"}


def test_a_second_adapter_beside_one_that_trains_the_rest_is_refused():
    model = poetx_family(train_rest=True)
    with pytest.raises(ValueError, match="train_rest=False"):
        model.add_adapter("other", config())
    model = poetx_family()
    with pytest.raises(ValueError, match="train_rest=False"):
        model.add_adapter("other", config(train_rest=True))


def test_adapters_that_start_from_different_weights_cannot_share_a_base():
    model = poetx_family(init="normalize")
    with pytest.raises(ValueError, match="use one init for all"):
        model.add_adapter("other", config(init="keep"))


def test_a_second_normalized_adapter_leaves_the_weights_as_they_are():
    model = poetx_family(init="normalize")
    before = base_weights(model)
    model.add_adapter("other", config(init="normalize"))
    assert tensors_equal(base_weights(model), before)


# Merging


def test_unmerging_restores_the_weights_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = randomize_skew(get_poetx_model(family_model("GPT2", dtype), config()))
        before = base_weights(model)
        model.merge_adapter()
        assert not tensors_equal(base_weights(model), before)
        model.unmerge_adapter()
        assert tensors_equal(base_weights(model), before)


def test_unmerging_two_adapters_restores_the_weights_bit_for_bit():
    model = two_adapters()
    before = base_weights(model)
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="Already following adapters were merged default"):
        model.merge_adapter(["default", "other"])
    model.unmerge_adapter()
    assert tensors_equal(base_weights(model), before)


def test_a_chosen_adapter_is_merged():
    model = two_adapters()
    model.set_adapter("other")
    expected = logits(model)
    model.set_adapter("default")
    merged = logits(copy.deepcopy(model).merge_and_unload(adapter_names=["other"]))
    assert (merged - expected).abs().max() <= 1e-4


def test_merging_twice_warns_and_changes_nothing():
    model = trained_poetx()
    model.merge_adapter()
    with unchanged(model), pytest.warns(UserWarning, match="All adapters are already merged, nothing to do"):
        model.merge_adapter()


def test_unmerging_what_is_not_merged_warns():
    with pytest.warns(UserWarning, match="Already unmerged"):
        poetx_family().unmerge_adapter()


def test_unmerging_periodic_merges_is_an_error():
    model = trained_poetx(merge_interval=2)
    merge_then_reinitialize(model)
    with pytest.raises(ValueError, match=r"no way back.*merge_interval=0"):
        model.unmerge_adapter()


def test_a_periodic_merge_of_a_merged_adapter_is_refused():
    model = trained_poetx(merge_interval=2)
    model.merge_adapter()
    with unchanged(model), pytest.raises(ValueError, match="unmerge_adapter"):
        merge_then_reinitialize(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "merge",
    [
        lambda model: model.merge_adapter(),
        lambda model: model.merge_and_unload(safe_merge=True),
        merge_then_reinitialize,
    ],
    ids=["merge_adapter", "merge_and_unload", "merge_then_reinitialize"],
)
def test_a_broken_block_is_named_and_no_layer_is_merged(value, merge):
    model = trained_poetx()
    name, layer = list(poetx_layers(model))[-1]
    with torch.no_grad():
        layer.poetx_skew_out["default"][0, 0] = value
    with unchanged(model), pytest.raises(ValueError, match="NaNs detected in the merged weights") as raised:
        merge(model)
    assert name.removeprefix("base_model.model.") in str(raised.value)
    assert "The adapter default seems to be broken" in str(raised.value)
    assert not any(layer.merged for _, layer in poetx_layers(model))


def test_safe_merge_refuses_a_base_weight_that_is_not_finite():
    model = trained_poetx()
    _, layer = next(poetx_layers(model))
    layer.get_base_layer().weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"NaNs detected.*left as it was"):
        layer.merge(safe_merge=True)
    assert not layer.merged


def test_merged_and_unloaded_model_is_a_plain_one_that_saves_and_loads(tmp_path):
    model = trained_poetx("Qwen2")
    expected = logits(model)
    plain = model.merge_and_unload()
    assert not any(isinstance(module, BaseTunerLayer) for module in plain.modules())
    assert not hasattr(plain, "peft_config")
    assert (logits(plain) - expected).abs().max() <= 1e-4
    plain.save_pretrained(tmp_path)
    assert torch.equal(logits(type(plain).from_pretrained(tmp_path)), logits(plain))


def test_unload_gives_the_base_model_back():
    plain = trained_poetx().unload()
    reference = family_model("Llama")
    assert tensors_equal(dict(plain.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("method", ["unload", "delete_adapter"])
def test_going_back_to_the_base_after_periodic_merges_warns(method):
    model = trained_poetx(merge_interval=2)
    merge_then_reinitialize(model)
    arguments = {"unload": (), "delete_adapter": ("default",)}[method]
    with pytest.warns(UserWarning, match=rf"{method}\(\) leaves base weights that have absorbed earlier merges"):
        getattr(model, method)(*arguments)


@pytest.mark.parametrize("settings", [{"merge_interval": 2}, {"train_rest": True}], ids=str)
def test_no_adapter_is_added_onto_what_a_deleted_one_has_changed(settings):
    model = trained_poetx(**settings)
    if "merge_interval" in settings:
        merge_then_reinitialize(model)
    with pytest.warns(UserWarning, match="delete_adapter"):
        model.delete_adapter("default")
    with pytest.raises(ValueError, match="the adapter that was deleted has changed the base weights"):
        model.add_adapter("second", PoetXConfig(block=7))
    assert not model.peft_config


def test_an_adapter_that_cannot_be_added_leaves_the_model_as_it_was():
    model = trained_poetx()
    before = set(model.state_dict())
    with pytest.raises(ValueError, match="base_error_bits=8 extends bfloat16 weights"):
        model.add_adapter("second", PoetXConfig(block=7, base_error_bits=8))
    assert set(model.state_dict()) == before and set(model.peft_config) == {"default"}
    assert all(set(layer.poetx_config) == {"default"} for _, layer in poetx_layers(model))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
def test_delta_weight_is_what_merging_adds(family):
    model = trained_poetx(family)
    for _, layer in poetx_layers(model):
        delta, before = layer.get_delta_weight("default"), layer.get_base_layer().weight.clone()
        layer.merge()
        assert torch.allclose(layer.get_base_layer().weight - before, delta, atol=1e-6)


# Which modules


def test_modules_to_save_are_trained_and_saved_beside_the_adapter(tmp_path):
    model = poetx_family(modules_to_save=["lm_head"])
    train_step(model)
    original = family_model("Llama").lm_head.weight
    assert not torch.equal(model.base_model.model.lm_head.weight, original)
    assert torch.equal(model.base_model.model.lm_head.original_module.weight, original)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(family_model("Llama"), tmp_path)), expected)


def test_trainable_tokens_are_trained_and_saved_beside_the_adapter(tmp_path):
    model = poetx_family(trainable_token_indices=[1, 3])
    train_step(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(family_model("Llama"), tmp_path)), expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"], ids=["untied", "tied"])
@pytest.mark.parametrize("safe_merge", [False, True])
def test_trainable_tokens_are_merged_with_the_adapter(family, safe_merge):
    model = poetx_family(family, trainable_token_indices=[1, 3])
    train_step(model, lr=1.0)
    expected = logits(model)
    merged = model.merge_and_unload(safe_merge=safe_merge)
    assert type(merged.get_input_embeddings()) is nn.Embedding
    embeddings, original = merged.get_input_embeddings().weight, family_model(family).get_input_embeddings().weight
    assert isinstance(embeddings, nn.Parameter)
    # A token that does not occur is trained in the head alone.
    assert {3} <= set((embeddings != original).any(dim=1).nonzero().flatten().tolist()) <= {1, 3}
    assert (merged.get_output_embeddings().weight is embeddings) == (family == "Qwen2")
    # fp32 rounding of two layers' worth of products, on outputs of the size of ten.
    assert (logits(merged) - expected).abs().max() <= 1e-4


def test_trainable_tokens_are_left_out_of_what_is_unloaded():
    model = poetx_family(trainable_token_indices=[1, 3])
    train_step(model, lr=1.0)
    assert torch.equal(logits(model.unload()), logits(family_model("Llama")))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": r".*layers\.1\..*_proj"}, {"1.q", "1.k", "1.v", "1.o", "1.gate", "1.up", "1.down"}),
        ({"target_modules": ["q_proj", "up_proj"]}, {"0.q", "0.up", "1.q", "1.up"}),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, {"1.q", "1.up"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, {"0.q"}),
        ({"target_modules": None, "layers_to_transform": [0], "exclude_modules": ["q_proj", "k_proj", "v_proj"]},
         {"0.o", "0.gate", "0.up", "0.down"}),
        ({"exclude_modules": r".*(mlp|self_attn)\.[kvogud].*"}, {"0.q", "1.q"}),
    ],
    ids=["regex", "names", "layers", "pattern", "all-but-some-of-a-layer", "exclude-by-regex"],
)  # fmt: skip
def test_targets_are_chosen_as_everywhere_in_peft(settings, expected):
    layers = [name for name, _ in poetx_layers(poetx_family(**settings))]
    short = {
        f"{name.split('layers.')[1].split('.')[0]}.{name.split('.')[-1].removesuffix('_proj')}" for name in layers
    }
    assert short == expected


def test_a_model_called_soft_prompt_is_no_target_by_its_name():
    base = nn.ModuleDict({"soft_prompt": nn.Linear(6, 6), "poetic": nn.Linear(6, 6), "proj": nn.Linear(6, 6)})
    model = get_poetx_model(base, config(target_modules=["proj"]))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".proj.poetx_skew" in name for name in trained)
    assert [name for name, _ in poetx_layers(model)] == ["base_model.model.proj"]


def test_a_target_that_is_no_linear_layer_is_refused_before_anything_is_wrapped():
    base = family_model("Llama")
    with pytest.raises(ValueError, match=r"'model.embed_tokens' is a Embedding.*linear layers"):
        get_poetx_model(base, config(target_modules=["q_proj", "embed_tokens"]))
    assert not any(isinstance(module, PoetXLayer) for module in base.modules())


def test_a_target_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing_like_it"):
        poetx_family(target_modules=["nothing_like_it"])


def test_a_tied_head_as_target_is_refused():
    with pytest.raises(ValueError, match=r"'lm_head' shares its weight with .*embed_tokens.*untie"):
        poetx_family("Qwen2", target_modules=["q_proj", "lm_head"])


def test_two_layers_of_one_storage_are_refused():
    base = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    base["b"].weight = nn.Parameter(base["a"].weight.data)
    with pytest.raises(ValueError, match="shares its weight"):
        get_poetx_model(base, config(target_modules=["a"]))


def test_one_layer_under_two_parents_is_refused():
    shared = nn.Linear(6, 6)
    base = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(nn.ReLU(), shared)})
    with pytest.raises(ValueError, match="shares its weight"):
        get_poetx_model(base, config(target_modules=["0"]))


def test_a_block_of_layers_that_is_used_twice_is_wrapped_once():
    block = nn.Sequential(nn.Linear(6, 6))
    base = nn.ModuleDict({"first": block, "second": block})
    model = randomize_skew(get_poetx_model(base, config(target_modules=["0"])))
    assert len(list(poetx_layers(model))) == 1
    x = torch.randn(3, 6)
    assert torch.equal(model.base_model.model["first"](x), model.base_model.model["second"](x))


# Around the model


def test_in_and_out_features_weight_and_bias_are_exposed():
    for _, layer in poetx_layers(poetx_family("GPT2")):
        base = layer.get_base_layer()
        assert (layer.in_features, layer.out_features) == tuple(base.weight.shape)
        assert layer.weight is base.weight and layer.bias is base.bias


def test_base_model_is_reached_and_representation_names_the_method():
    model = poetx_family()
    assert type(model.get_base_model()).__name__ == "LlamaForCausalLM"
    assert "poetx.PoetXLinear" in repr(model) and "block={'default': 7}" in repr(model)


def test_deep_copies_are_equal_and_independent():
    model = trained_poetx()
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    randomize_skew(twin, seed=99)
    assert not torch.equal(logits(twin), logits(model))


def test_pickled_plain_model_gives_the_same_outputs():
    model = randomize_skew(get_poetx_model(nn.Sequential(nn.Linear(9, 5)), config(target_modules=["0"])))
    x = torch.randn(4, 9)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_direct_injection_saves_and_loads_without_a_peft_model(tmp_path):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model = randomize_skew(inject_adapter_in_model(config(), family_model("Llama")))
    merge_count = {name: int(layer.poetx_merge_count["default"]) for name, layer in poetx_layers(model)}
    assert set(merge_count.values()) == {0}
    state_dict = get_peft_model_state_dict(model)
    other = inject_adapter_in_model(config(), family_model("Llama"))
    result = set_peft_model_state_dict(other, state_dict)
    assert not result.unexpected_keys
    assert torch.equal(logits(other), logits(model))


def test_injection_with_low_memory_leaves_adapters_on_meta():
    model = inject_adapter_in_model(config(), family_model("Llama"), low_cpu_mem_usage=True)
    assert {p.device.type for n, p in model.named_parameters() if "poetx_skew" in n} == {"meta"}
    assert {p.device.type for n, p in model.named_parameters() if "poetx_skew" not in n} == {"cpu"}


def test_only_adapters_require_gradients_and_embeddings_do_when_asked():
    model = poetx_family()
    assert not model.get_input_embeddings()(tokens()).requires_grad
    model = get_poetx_model(prepare_model_for_kbit_training(family_model("Llama")), config())
    model.enable_input_require_grads()
    assert model.get_input_embeddings()(tokens()).requires_grad


def test_input_embeddings_can_be_passed_instead_of_tokens():
    model = trained_poetx()
    embedded = model.get_input_embeddings()(tokens())
    assert torch.equal(model(inputs_embeds=embedded).logits, model(input_ids=tokens()).logits)


def test_generation_takes_positional_arguments():
    assert trained_poetx().generate(tokens(1, 4), max_new_tokens=2, pad_token_id=0).shape == (1, 6)


def test_base_state_dict_is_the_unwrapped_models_and_can_be_set():
    from peft import get_base_model_state_dict, set_base_model_state_dict

    reference = copies(family_model("Llama").state_dict())
    model = trained_poetx()
    assert tensors_equal(copies(get_base_model_state_dict(model)), reference)
    with torch.no_grad():
        for parameter in model.get_base_model().parameters():
            parameter.add_(1)
    result = set_base_model_state_dict(model, reference, strict=False)
    assert not result.missing_keys and not result.unexpected_keys
    assert tensors_equal(copies(get_base_model_state_dict(model)), reference)


def test_moving_a_model_to_another_dtype_keeps_counts_and_figures():
    model = poetx_family(track_spectrum=True)
    before = copies({n: b for n, b in model.named_buffers() if "poetx_start" in n or "poetx_finger" in n})
    model.to(torch.float16)
    assert before and tensors_equal({n: b for n, b in model.named_buffers() if n in before}, before)


def test_norms_named_by_their_last_word_can_be_trained_merged_saved_and_loaded(tmp_path):
    """PEFT takes every module whose name ends with "norm" for one of `modules_to_save`."""
    base = save_to(family_model("Llama"), tmp_path / "base")
    load = AutoModelForCausalLM.from_pretrained
    model = get_poetx_model(load(base), config(modules_to_save=["norm"], merge_interval=2))
    train_step(model)
    merge_then_reinitialize(model)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(PeftModel.from_pretrained(load(base), tmp_path / "adapter")), logits(model))


def test_disabling_is_refused_where_the_rest_is_trained_in_place():
    model = poetx_family(train_rest=True, merge_interval=0)
    with pytest.raises(ValueError, match="train_rest=True trains"), model.disable_adapter():
        pass
    with pytest.warns(UserWarning, match="as train_rest trained them"):
        model.unload()


def test_a_merge_under_several_adapters_is_refused_whatever_the_interval():
    model = two_adapters(merge_interval=0)
    before = base_weights(model)
    with pytest.raises(ValueError, match=r"under all adapters of this model, \['default', 'other'\]"):
        merge_then_reinitialize(model)
    assert tensors_equal(base_weights(model), before)


def test_a_merge_with_an_optimizer_that_lacks_the_skew_entries_is_refused():
    model = poetx_family(train_rest=True, merge_interval=2)
    other = torch.optim.SGD([p for name, p in model.named_parameters() if "poetx_" not in name])
    before = base_weights(model)
    with pytest.raises(ValueError, match="pass the optimizer that trains them"):
        merge_then_reinitialize(model, other)
    assert tensors_equal(base_weights(model), before)


def test_one_config_for_two_models_stays_as_it_was_written():
    shared = PoetXConfig(block=8, target_modules="all-linear")
    first = get_poetx_model(family_model("Llama"), shared)
    assert shared.target_modules == "all-linear" and shared.base_config is None and shared.skew_dtype is None
    assert first.peft_config["default"].base_config is not None


def test_loading_base_weights_into_a_merged_model_is_refused(tmp_path):
    base = save_to(family_model("Llama"), tmp_path / "base")
    load = AutoModelForCausalLM.from_pretrained
    model = randomize_skew(get_poetx_model(load(base), config(merge_interval=2)))
    merge_then_reinitialize(model)
    model.save_pretrained(tmp_path / "adapter")
    other = randomize_skew(get_poetx_model(load(base), config(merge_interval=2)))
    other.merge_adapter()
    with pytest.raises(ValueError, match=r"call unmerge_adapter\(\) before loading"):
        other.load_adapter(tmp_path / "adapter", "default")


def test_error_bits_of_a_model_that_was_cast_are_not_read_as_others():
    model = randomize_skew(get_poetx_model(family_model("Llama").bfloat16(), config(base_error_bits=8)))
    merge_then_reinitialize(model)
    model.half()
    with pytest.raises(ValueError, match=r"float16 now; cast the model back to bfloat16"):
        model.merge_adapter()


def test_copies_have_no_clock():
    model = poetx_family(merge_interval=2)
    model.base_model.clock = "Trainer"
    assert copy.deepcopy(model).base_model.clock is None
    assert pickle.loads(pickle.dumps(model)).base_model.clock is None


def test_a_data_parallel_replica_is_refused():
    """`nn.DataParallel` makes them by this method of every module."""
    model = poetx_family()
    _, layer = next(iter(poetx_layers(model)))
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        layer._replicate_for_data_parallel()(torch.randn(2, layer.in_features))
