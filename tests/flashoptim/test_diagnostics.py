"""The diagnostics measure what they say and touch nothing."""

import pytest
import torch
from torch import nn

from hf_flashoptim import FlashAdamW, FlashLion, FlashSGD, compression_error, compression_report
from tests.flashoptim.models import ALL, assert_bit_equal, mixed_model, set_gradients, small_model, tensors_of, train


@pytest.mark.parametrize("cls, options", ALL.values(), ids=ALL.keys())
def test_a_report_changes_nothing(cls, options):
    model = mixed_model()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(2))
    set_gradients(model, 2)
    before = tensors_of(model, optimizer)
    report = compression_report(optimizer, model)
    assert_bit_equal(tensors_of(model, optimizer), before)
    assert set(report) == {name for name, _ in model.named_parameters()}
    expected = {m.name for m in optimizer.moments(optimizer.param_groups[0])}
    assert set(report["2.weight"].nmse) == expected and not report["2.bias"].nmse


def test_nmse_is_the_error_of_the_codes_that_the_step_stores():
    model = small_model(torch.float32)
    optimizer = FlashLion(model.parameters())
    train(model, optimizer, range(3))
    p = model[2].weight
    moment = optimizer.moments(optimizer.param_groups[0])[0]

    def decoded():
        return moment.dequantize(optimizer.state[p]["exp_avg_codes"], optimizer.state[p]["exp_avg_scale"]).double()

    old = decoded()
    set_gradients(model, 3)
    exact = 0.99 * old + 0.01 * p.grad.double()
    measured = compression_error(optimizer, p).nmse["exp_avg"]
    optimizer.step()
    truth = (decoded() - exact).square().sum() / exact.square().sum()
    assert measured == pytest.approx(truth.item(), rel=1e-3)
    assert 0 < measured < 1e-3


@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
def test_lost_updates_are_those_that_round_to_nothing():
    for bits, lost in ((None, 1.0), (32, 0.0)):
        p = nn.Parameter(torch.full((4, 64), 1.0, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = FlashLion([p], lr=1e-5, master_weight_bits=bits)
        assert compression_error(optimizer, p).lost_updates == lost


def test_a_spread_within_groups_shows_in_the_nmse():
    p = nn.Parameter(torch.zeros(4, 64))
    optimizer = FlashAdamW([p])
    p.grad = torch.randn(4, 64)
    calm = compression_error(optimizer, p).nmse["exp_avg"]
    p.grad = torch.randn(4, 64) * 0.01
    p.grad[:, ::32] = 1.0
    wild = compression_error(optimizer, p).nmse
    assert wild["exp_avg"] < 1e-2 and calm < 1e-3


def test_no_gradient_is_an_error():
    model = small_model()
    with pytest.raises(ValueError, match="no gradient"):
        compression_error(FlashSGD(model.parameters()), model[2].weight)
