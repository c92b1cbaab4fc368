"""Quantized base models: they train with merge_interval=0, and what cannot be written back truly is refused."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from torch import nn

from hf_poetx import PoetXConfig, get_poetx_model, merge_then_reinitialize
from hf_poetx.checkpoint import poetx_layers
from tests.poetx.helpers import family_model, logits, randomize_skew, train_step

HAVE = {name: importlib.util.find_spec(name) is not None for name in ("bitsandbytes", "torchao")}


def _bitsandbytes(kind: str) -> Callable[[], nn.Module]:
    def quantized() -> nn.Module:
        import bitsandbytes as bnb

        # Widths that its kernels on the CPU take.
        model = family_model("Llama", hidden_size=64, intermediate_size=128)
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or name == "lm_head":
                continue
            size = (module.in_features, module.out_features, False)
            if kind == "8bit":
                replacement = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
                weight = bnb.nn.Int8Params(module.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
            else:
                replacement = bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type="nf4")
                weight = bnb.nn.Params4bit(module.weight.data.clone(), requires_grad=False, quant_type="nf4")
            replacement.weight = weight
            model.set_submodule(name, replacement.to("cpu"))
        return model.eval()

    return quantized


def _torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = family_model("Llama", hidden_size=64, intermediate_size=128)
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


KINDS = {
    "bnb-8bit": ("bitsandbytes", _bitsandbytes("8bit")),
    "bnb-4bit": ("bitsandbytes", _bitsandbytes("4bit")),
    "torchao": ("torchao", _torchao),
}


@pytest.fixture(params=KINDS)
def quantized(request) -> Callable[[], nn.Module]:
    package, build = KINDS[request.param]
    if not HAVE[package]:
        pytest.skip(f"{package} is not installed")
    return build


def wrap(base: nn.Module, **settings) -> nn.Module:
    return get_poetx_model(base, PoetXConfig(**{"block": 16, "merge_interval": 0} | settings))


def test_a_fresh_wrap_gives_the_outputs_of_the_quantized_model(quantized):
    before = logits(quantized())
    model = wrap(quantized())
    assert len(list(poetx_layers(model))) == 14
    assert torch.allclose(logits(model), before, atol=1e-5)


def test_a_bias_of_a_quantized_layer_stays_outside_of_the_rotations():
    if not HAVE["bitsandbytes"]:
        pytest.skip("bitsandbytes is not installed")
    import bitsandbytes as bnb

    linear = nn.Linear(64, 32)
    base = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    base.load_state_dict(linear.state_dict())
    base.to("cpu")
    x = torch.randn(5, 64)
    before = base(x)
    model = wrap(nn.Sequential(base), target_modules=["0"])
    assert torch.equal(model(x), before)
    randomize_skew(model)
    # A rotation of zero is zero, so what comes out is the bias itself.
    assert torch.allclose(model(torch.zeros(1, 64)), linear.bias[None], atol=1e-6)


def test_every_adapter_on_a_quantized_base_trains(quantized):
    model = wrap(quantized())
    train_step(model)
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.any(), name


def test_periodic_merging_into_quantized_weights_is_refused_before_anything_is_wrapped(quantized):
    base = quantized()
    with pytest.raises(ValueError, match=r"is quantized.*merge_interval=0.*instead of merge_interval=200"):
        get_poetx_model(base, PoetXConfig(block=16))
    assert not list(poetx_layers(base))


@pytest.mark.parametrize("setting", [{"init": "normalize"}, {"base_error_bits": 8}, {"track_spectrum": True}])
def test_what_needs_the_weight_itself_is_refused(quantized, setting):
    with pytest.raises(ValueError, match=rf"is quantized.*{next(iter(setting))}"):
        wrap(quantized(), **setting)


def test_adapters_of_a_quantized_base_are_saved_and_loaded(quantized, tmp_path):
    model = randomize_skew(wrap(quantized()))
    expected = logits(model)
    model.get_base_model().name_or_path = "somewhere"
    model.peft_config["default"].base_config = None
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="could not be compared"):
        loaded = PeftModel.from_pretrained(quantized(), tmp_path)
    assert torch.allclose(logits(loaded), expected, atol=1e-5)


def test_unmerging_a_quantized_base_restores_it_bit_for_bit(quantized):
    model = randomize_skew(wrap(quantized()))
    adapted = logits(model)
    with model.disable_adapter():
        before = logits(model)
    supports = all(layer.quantization_backend.supports_merge for _, layer in poetx_layers(model))
    if not supports:
        with pytest.raises(ValueError, match="cannot be written"):
            model.merge_adapter()
        return
    with pytest.warns(UserWarning, match="rounds the result"):
        model.merge_adapter()
    merged = logits(model)
    assert (merged - adapted).norm() < (merged - before).norm()
    model.unmerge_adapter()
    assert torch.equal(logits(model), adapted)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)


def test_a_merge_that_is_asked_for_by_hand_is_refused(quantized):
    model = randomize_skew(wrap(quantized()))
    with pytest.raises(ValueError, match="quantized"):
        merge_then_reinitialize(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_weights_that_are_no_numbers_by_themselves_count_as_quantized(dtype):
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) * 0.5)

    base = Scaled(8, 8, bias=False)
    base.weight = nn.Parameter(torch.randn(8, 8).to(dtype), requires_grad=False)
    x = torch.randn(3, 8)
    before = base(x)
    with pytest.raises(ValueError, match="is quantized"):
        get_poetx_model(nn.Sequential(base), PoetXConfig(block=4, target_modules=["0"]))
    model = wrap(nn.Sequential(base), block=4, target_modules=["0"])
    assert torch.equal(model(x), before)
    with pytest.raises(ValueError, match="cannot be written"):
        model.merge_adapter()
