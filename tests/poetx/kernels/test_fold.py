import pytest
import torch

from hf_poetx.ops import fold as ops
from tests.poetx.kernels.accuracy import DTYPES, assert_as_accurate
from tests.poetx.kernels.test_poetx_linear import cast, make

pytest.importorskip("triton")
from hf_poetx.kernels import fold as kernels


# With a last block on neither side, on one and on both.
@pytest.mark.parametrize("widths", [(96, 64), (72, 64), (72, 40)], ids=str)
@pytest.mark.parametrize("groups", [(8, 8), (1, 1), (1, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_folded_weight_and_its_gradients_are_as_accurate_as_the_cpu(widths, groups, dtype, kernel_device):
    (_, weight, _), rotations = make(*widths, 32, *groups, dtype)
    gradient = torch.randn_like(weight)

    def run(forward, backward, weight, gradient, rotations):
        return [forward(weight, *rotations), *backward(gradient, weight, *rotations, [True, True])]

    on_cpu, device = (ops._fold, ops._fold_backward), kernel_device
    truth = run(*on_cpu, weight.double(), gradient.double(), cast(rotations, torch.float64))
    yardstick = run(*on_cpu, weight, gradient, rotations)
    found = run(kernels.forward, kernels.backward, weight.to(device), gradient.to(device), cast(rotations, device))
    assert [each.shape for each in found] == [each.shape for each in truth]
    for each, measure, expected in zip(found, yardstick, truth, strict=True):
        assert each.is_contiguous()
        assert_as_accurate(each, measure, expected, dtype)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_only_needed_gradients_are_returned_in_order(needs, kernel_device):
    (_, weight, _), rotations = make(72, 40, 32, 8, 8, torch.float32)
    weight, rotations = weight.to(kernel_device), cast(rotations, kernel_device)
    gradient = torch.randn_like(weight)
    everything = kernels.backward(gradient, weight, *rotations, [True, True])
    parts = [everything[0:2], everything[2:4]]
    expected = [tensor for part, needed in zip(parts, needs, strict=True) if needed for tensor in part]
    found = kernels.backward(gradient, weight, *rotations, list(needs))
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert torch.equal(each, wanted)


def test_a_transposed_weight_is_folded_alike(kernel_device):
    (_, weight, _), rotations = make(64, 96, 32, 8, 8, torch.float32)
    weight, rotations = weight.to(kernel_device), cast(rotations, kernel_device)
    by_columns = weight.t().contiguous().t()
    assert torch.equal(kernels.forward(by_columns, *rotations), kernels.forward(weight, *rotations))
