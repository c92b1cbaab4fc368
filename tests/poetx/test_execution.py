"""Ways of running a wrapped model: dtypes and autocast, checkpointed activations, compiled graphs, offloaded weights."""

import pytest
import torch
from accelerate import cpu_offload
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_poetx import PoetXConfig, get_poetx_model, merge_step, merge_then_reinitialize
from hf_poetx.checkpoint import poetx_layers
from tests.poetx.helpers import (
    family_model,
    logits,
    poetx_family,
    randomize_skew,
    tokens,
    train_step,
    trained_poetx,
)
from tests.versions import needs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wrap(dtype: torch.dtype, family: str = "Llama", **settings) -> nn.Module:
    config = PoetXConfig(**{"block": 8, "merge_interval": 0} | settings)
    return get_poetx_model(family_model(family, dtype), config)


# Dtype of the base model and of autocast.
MIXES = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, None),
    (torch.float16, torch.float16),
]


def before_and_after_wrapping(family: str, dtype: torch.dtype, autocast: torch.dtype | None) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        return logits(family_model(family, dtype)), logits(wrap(dtype, family))


@pytest.mark.parametrize("family", ["Llama", "Falcon"])
@pytest.mark.parametrize(("dtype", "autocast"), MIXES, ids=str)
def test_a_fresh_wrap_changes_nothing_in_any_mix_of_dtypes(family, dtype, autocast):
    before, after = before_and_after_wrapping(family, dtype, autocast)
    assert after.dtype == before.dtype and torch.equal(after, before)


@pytest.mark.parametrize(("dtype", "autocast"), MIXES[1:], ids=str)
def test_a_bias_is_added_after_one_more_rounding_in_half_precision(dtype, autocast):
    before, after = before_and_after_wrapping("GPT2", dtype, autocast)
    assert after.dtype == before.dtype
    # Eight layers with a bias, each rounded once more to a relative 2^-9 or 2^-11.
    assert (after - before).norm() <= 8 * torch.finfo(autocast or dtype).eps * before.norm()


@pytest.mark.parametrize("skew_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mix_of_dtypes_trains_in_the_dtype_of_the_skew_entries(dtype, skew_dtype):
    model = wrap(dtype, skew_dtype=skew_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        model.train()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    for _, layer in poetx_layers(model):
        for parameter in layer.skew_parameters("default"):
            assert parameter.dtype == parameter.grad.dtype == getattr(torch, skew_dtype)
            assert torch.isfinite(parameter.grad).all() and parameter.grad.any()


def test_gradients_of_a_half_precision_model_are_those_of_the_full_one_to_its_rounding():
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        # The same weights in both: those that bfloat16 holds.
        base = family_model("Llama", torch.bfloat16).to(dtype)
        model = randomize_skew(get_poetx_model(base, PoetXConfig(block=8, merge_interval=0)))
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        gradients[dtype] = torch.cat([grad.flatten().float() for _, grad in named])
    full, half = gradients.values()
    # Some ten roundings of 2^-9 in sequence, in two layers.
    assert (half - full).norm() <= 0.05 * full.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_autocast_of_adapters_their_dtype_is_the_base_models_and_is_remembered(tmp_path, dtype):
    from peft import get_peft_model

    model = get_peft_model(
        family_model("Llama", dtype), PoetXConfig(block=8, merge_interval=0), autocast_adapter_dtype=False
    )
    model.add_adapter("added", PoetXConfig(block=8, merge_interval=0), autocast_adapter_dtype=False)
    expected = str(dtype).removeprefix("torch.")
    assert {p.dtype for n, p in model.named_parameters() if "poetx_skew" in n} == {dtype}
    assert {config.skew_dtype for config in model.peft_config.values()} == {expected}
    randomize_skew(model).save_pretrained(tmp_path)
    # PEFT's default would cast to float32, and Trainer resumes with it.
    loaded = PeftModel.from_pretrained(family_model("Llama", dtype), tmp_path)
    assert {p.dtype for n, p in loaded.named_parameters() if "poetx_skew" in n} == {dtype}
    assert torch.equal(logits(loaded), logits(model))


def test_full_precision_adapters_stay_so_where_autocast_of_adapters_is_off_at_loading(tmp_path):
    model = randomize_skew(wrap(torch.bfloat16))
    assert model.peft_config["default"].skew_dtype == "float32"
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(family_model("Llama", torch.bfloat16), tmp_path, autocast_adapter_dtype=False)
    assert {p.dtype for n, p in loaded.named_parameters() if "poetx_skew" in n} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_generation_and_merging_work_in_half_precision(dtype):
    model = randomize_skew(wrap(dtype))
    assert model.generate(input_ids=tokens(), max_new_tokens=3, pad_token_id=0).shape == (2, 12)
    before = logits(model).float()
    merged = logits(model.merge_and_unload()).float()
    # Rounding the merged weights moves every product by 2^-9 or 2^-11 of the terms' size.
    assert (merged - before).norm() <= 16 * torch.finfo(dtype).eps * before.norm()


def test_merging_is_done_in_full_precision_whatever_autocast_is_set():
    reference, cast = trained_poetx(), trained_poetx()
    reference.merge_adapter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.merge_adapter()
    for (_, left), (_, right) in zip(poetx_layers(reference), poetx_layers(cast), strict=True):
        assert torch.equal(left.get_base_layer().weight, right.get_base_layer().weight)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_checkpointed_activations_give_the_same_gradients(family, use_reentrant):
    gradients = []
    for checkpointed in (False, True):
        model = randomize_skew(poetx_family(family, block=8)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if "poetx_skew" in n})
    plain, recomputed = gradients
    assert all(torch.equal(plain[name], recomputed[name]) and plain[name].any() for name in plain)


@needs("torch", "2.8", "transformers' plain model is not one graph either")
@pytest.mark.parametrize("mode", ["fast", "mem"])
def test_one_full_graph_trains_like_the_plain_model_through_all_merges(mode):
    losses = []
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for backend in (None, counter):
        base = family_model("Llama", num_hidden_layers=1)
        config = PoetXConfig(block=7, memory_mode=mode, merge_interval=2, target_modules=["q_proj", "down_proj"])
        model = get_poetx_model(base, config).train()
        call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        trace = []
        for _ in range(6):
            loss = call(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            merge_step(model, optimizer)
            trace.append(loss.item())
        losses.append(trace)
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_offloaded_weights_run_merge_and_unmerge_but_take_no_periodic_merge(family):
    expected = logits(trained_poetx(family))
    base = family_model(family)
    cpu_offload(base, execution_device=torch.device("cpu"))
    model = get_poetx_model(base, PoetXConfig(block=7, merge_interval=5))
    randomize_skew(model)
    assert all(layer.get_base_layer().weight.is_meta for _, layer in poetx_layers(model))
    assert torch.allclose(logits(model), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"offloaded.*merge_interval=0"):
        merge_then_reinitialize(model)
    model.merge_adapter()
    assert torch.allclose(logits(model), expected, atol=1e-4)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(family_model(family)))


def test_offloaded_weights_cannot_be_normalized():
    base = family_model("Llama")
    cpu_offload(base, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"not in memory.*init='keep'"):
        get_poetx_model(base, PoetXConfig(block=8, init="normalize"))


def test_the_rest_is_trained_in_place_and_frozen_for_inference():
    model = poetx_family(train_rest=True)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    train_step(model)
    assert model.get_input_embeddings().weight is embedding and not torch.equal(embedding, before)
    frozen = poetx_family(train_rest=True, inference_mode=True)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
