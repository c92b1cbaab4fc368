"""Casting models, and error bits by hand."""

import io

import pytest
import torch
from torch import nn

from hf_flashoptim import cast_model, compute_ecc_bits, reconstruct_fp32_param


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        return self.head(self.body(x))


def test_parameters_and_floating_buffers_are_cast_and_norms_with_statistics_kept():
    model = Net()
    cast_model(model)
    assert model.body[0].weight.dtype == model.table.dtype == torch.bfloat16
    assert model.body[1].weight.dtype == model.body[1].running_mean.dtype == torch.float32
    assert model.count.dtype == torch.int64
    cast_model(model, selective=False)
    assert model.body[1].weight.dtype == torch.bfloat16


def test_a_layer_kept_in_fp32_takes_16_bit_inputs_and_gives_fp32():
    model = Net()
    cast_model(model, full_precision_layers=["head"], selective=False)
    assert model.head.weight.dtype == torch.float32
    assert model(torch.randn(4, 4, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("by_reference", [True, False])
def test_a_layer_in_the_middle_casts_its_output_back(by_reference):
    model = Net()
    spec = model.body[0] if by_reference else "*.0"
    cast_model(model, torch.float16, full_precision_recast_layers=[spec], selective=False)
    outputs = []
    model.body[0].register_forward_hook(lambda m, a, o: outputs.append(o.dtype))
    assert model(torch.randn(4, 4, dtype=torch.float16)).dtype == torch.float16
    assert model.body[0].weight.dtype == torch.float32 and outputs == [torch.float16]


def test_patterns_that_match_nothing_are_an_error():
    with pytest.raises(ValueError, match=r"0"):
        cast_model(Net(), full_precision_layers=["0"])


def test_tied_parameters_stay_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    cast_model(model)
    assert model["head"].weight is model["embed"].weight and model["head"].weight.dtype == torch.bfloat16
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight.data = first.weight.data
    cast_model(nn.Sequential(first, second))
    assert first.weight.data_ptr() == second.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bytewidth, error_dtype, bound", [(3, torch.int8, 2.0**-8), (4, torch.int16, 2.0**-16)])
def test_error_bits_by_hand(dtype, bytewidth, error_dtype, bound):
    master = torch.randn(100, 7)
    narrow = master.to(dtype)
    errors = compute_ecc_bits(master, narrow, bytewidth)
    assert errors.dtype == error_dtype and errors.shape == master.shape
    rebuilt = reconstruct_fp32_param(narrow, errors)
    assert ((rebuilt - master).abs() <= bound * torch.finfo(dtype).eps * narrow.abs().float()).all()


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: reconstruct_fp32_param(torch.zeros(2), torch.zeros(2, dtype=torch.int8)), "float32"),
        (lambda: reconstruct_fp32_param(torch.zeros(2).half(), torch.zeros(2)), "error_bits"),
        (lambda: reconstruct_fp32_param(torch.zeros(2).half(), torch.zeros(3, dtype=torch.int8)), "shape"),
        (lambda: compute_ecc_bits(torch.zeros(2).half(), torch.zeros(2).half()), "fp32_param"),
        (lambda: compute_ecc_bits(torch.zeros(2), torch.zeros(2)), "narrow_param"),
        (lambda: compute_ecc_bits(torch.zeros(2), torch.zeros(3).half()), "Shapes"),
        (lambda: compute_ecc_bits(torch.zeros(2), torch.zeros(2).half(), 2), "master_bytewidth=2"),
    ],
)
def test_error_bits_of_the_wrong_kind_are_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_tied_parameter_behind_other_layers_keeps_its_own_values(width):
    """Memory that casting the first layer has freed may be taken by a later copy, whose address then says nothing."""
    model = nn.Sequential(nn.Linear(width, width), nn.Embedding(width, width), nn.Linear(width, width, bias=False))
    model[2].weight = model[1].weight
    expected = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    cast_model(model)
    assert model[2].weight is model[1].weight
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name]), name


def test_different_views_of_one_memory_stay_views_of_one_memory():
    memory = torch.randn(8, 4)
    model = nn.Module()
    model.whole, model.part, model.turned = (nn.Parameter(view) for view in (memory, memory[2:5, 1:], memory.t()))
    cast_model(model)
    for view, expected in ((model.whole, memory), (model.part, memory[2:5, 1:]), (model.turned, memory.t())):
        assert torch.equal(view, expected.bfloat16())
    model.whole.data.zero_()
    assert not model.part.any() and not model.turned.any()


def test_a_layer_that_returns_a_model_output_casts_it_as_one():
    from tests.flashoptim.llama import tiny_llama

    model = tiny_llama()
    cast_model(model, full_precision_recast_layers=["model"])
    assert model(torch.arange(8)[None]).logits.dtype == torch.bfloat16


def test_cast_models_pickle():
    model = Net()
    cast_model(model, full_precision_recast_layers=["body.0"], full_precision_layers=["head"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_a_layer_may_be_told_later_to_cast_its_output_back():
    model = Net()
    cast_model(model, full_precision_layers=["body.0"], selective=False)
    cast_model(model, full_precision_recast_layers=["body.0"], selective=False)
    assert model(torch.randn(4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
