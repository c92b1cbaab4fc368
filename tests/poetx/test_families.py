"""Any causal language model: all linear layers but head and routers are found, wrapped, trained and merged."""

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_poetx import PoetXConfig, get_poetx_model
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.targets import router_names
from tests.poetx.helpers import (
    BLOCK,
    FAMILIES,
    MIXTURES,
    copies,
    family_model,
    logits,
    messages,
    poetx_family,
    randomize_skew,
    tokens,
    train_step,
)

each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_default_targets_are_all_linear_layers_but_the_head(family):
    base = family_model(family)
    head = base.get_output_embeddings()
    linear = {name for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    expected = {name for name in linear if base.get_submodule(name) is not head}
    model = get_poetx_model(base, PoetXConfig(block=BLOCK))
    wrapped = {name.removeprefix("base_model.model.") for name, _ in poetx_layers(model)}
    assert wrapped == expected
    assert {name.rpartition(".")[2] for name in wrapped} == FAMILIES[family][3]


@each_family
def test_wrapped_outputs_are_those_of_the_unwrapped_model_bit_for_bit(family):
    base = family_model(family)
    before = logits(base)
    assert torch.equal(logits(get_poetx_model(base, PoetXConfig(block=BLOCK))), before)


@each_family
@pytest.mark.parametrize("memory_mode", ["fast", "mem"])
def test_one_training_step_moves_every_adapter_and_nothing_else(family, memory_mode):
    model = poetx_family(family, memory_mode=memory_mode)
    before = copies(model.state_dict())
    train_step(model)
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".poetx_skew" in name}


@each_family
def test_merged_outputs_equal_unmerged_ones(family):
    model = randomize_skew(poetx_family(family))
    unwrapped, unmerged = logits(family_model(family)), logits(model)
    merged = logits(model.merge_and_unload())
    assert (merged - unmerged).abs().max() <= 1e-4
    assert (unwrapped - unmerged).abs().max() > 1e-2, "the rotations must matter for this to say anything"


@each_family
def test_every_side_that_the_block_does_not_divide_has_a_smaller_last_block(family):
    for _, layer in poetx_layers(poetx_family(family)):
        for side in ("in", "out"):
            full, rest = divmod(layer.width(side), BLOCK)
            assert getattr(layer, f"poetx_skew_{side}")["default"].shape == (full, BLOCK * (BLOCK - 1) // 2)
            tails = getattr(layer, f"poetx_skew_{side}_tail")
            assert ("default" in tails) == (rest >= 2)
            if rest >= 2:
                assert tails["default"].shape == (1, rest * (rest - 1) // 2)


@each_family
def test_train_rest_trains_all_that_is_neither_wrapped_nor_a_stacked_expert(family):
    model = poetx_family(family, train_rest=True)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name for name in frozen if not name.endswith("base_layer.weight")} == {
        name for name, parameter in model.named_parameters() if ".experts." in name and parameter.dim() == 3
    }
    assert sum(name.endswith("base_layer.weight") for name in frozen) == len(list(poetx_layers(model)))


@pytest.mark.parametrize("family", MIXTURES)
def test_frozen_stacked_experts_are_said_once(family):
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        model = poetx_family(family)
        model.add_adapter("other", PoetXConfig(block=BLOCK, merge_interval=0))
    assert len(messages(recorded, "stacked expert weights stay frozen")) == 1
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".experts." in name)


def test_a_dense_model_says_nothing_about_experts():
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        poetx_family("Llama")
    assert not messages(recorded, "expert")


def test_tied_embeddings_stay_tied_and_are_trained_once():
    model = poetx_family("Qwen2", train_rest=True)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is embedding
    train_step(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum(parameter is embedding for parameter in model.parameters()) == 1


class _Mixture(nn.Module):
    """Linear layers with the names that mixtures of experts and other models give to routers and gates."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = {"model_type": "custom", **config}
        self.gate = nn.Linear(12, 4)
        self.shared_expert_gate = nn.Linear(12, 1)
        self.output_gate = nn.Linear(12, 12)
        self.gate_proj = nn.Linear(12, 4)
        self.router = nn.ModuleDict({"layer": nn.Linear(12, 6)})


def _names_without_routers(base: nn.Module) -> set[str]:
    names = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    return names - set(router_names(base))


def test_routers_are_told_from_layers_of_full_width_that_are_called_gates():
    assert _names_without_routers(_Mixture(num_local_experts=4)) == {"output_gate", "gate_proj"}


def test_a_gate_of_a_dense_model_is_no_router():
    assert _names_without_routers(_Mixture()) == {"gate", "output_gate", "gate_proj"}


def test_a_convolution_is_trained_with_the_rest_although_its_weight_has_three_dimensions():
    base = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(6, 6))
    model = get_poetx_model(base, PoetXConfig(target_modules=["1"], block=3, train_rest=True))
    assert model.base_model.model[0].weight.requires_grad


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Falcon"])
def test_generation_with_cache_gives_what_it_gives_without(family):
    model = randomize_skew(poetx_family(family))
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(input_ids=tokens(1, 5), use_cache=True, **arguments)
    assert torch.equal(with_cache, model.generate(input_ids=tokens(1, 5), use_cache=False, **arguments))


def test_layers_that_torchs_own_attention_reads_past_are_left_out_and_refused_by_name():
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    wrapped = get_poetx_model(copy.deepcopy(model), PoetXConfig(block=8, target_modules="all-linear"))
    assert [name.removeprefix("base_model.model.") for name, _ in poetx_layers(wrapped)] == ["0"]
    with pytest.raises(ValueError, match=r"'1.self_attn.out_proj' is part of torch's own attention"):
        get_poetx_model(model, PoetXConfig(block=8, target_modules=["out_proj"]))


@pytest.mark.parametrize("family, left_out", [("Mamba", {"x_proj", "dt_proj", "out_proj"}), ("Mamba2", {"out_proj"})])
def test_layers_that_fused_state_space_kernels_read_past_are_left_out_and_all_others_train(family, left_out):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2} if family == "Mamba2" else {}
    base = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    assert left_out < linear
    model = get_poetx_model(base, PoetXConfig(block=8, init_weights=False))
    assert {name.rpartition(".")[2] for name, _ in poetx_layers(model)} == linear - left_out - {"lm_head"}
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "task, model_class, head",
    [
        ("SEQ_CLS", "LlamaForSequenceClassification", "score"),
        ("TOKEN_CLS", "LlamaForTokenClassification", "score"),
        ("QUESTION_ANS", "LlamaForQuestionAnswering", "qa_outputs"),
    ],
)
def test_the_new_head_of_a_task_is_trained_whole_and_all_other_linear_layers_are_wrapped(task, model_class, head):
    base = family_model("Llama")
    model = get_poetx_model(getattr(transformers, model_class)(base.config), PoetXConfig(block=8, task_type=task))
    names = {name.rpartition(".")[2] for name, _ in poetx_layers(model)}
    assert names == FAMILIES["Llama"][3]
    whole = [name for name, p in model.named_parameters() if p.requires_grad and "poetx_" not in name]
    assert whole and all(f"{head}.modules_to_save.default" in name for name in whole)
