import pytest
import torch

from hf_poetx.ops import poetx_linear as ops
from hf_poetx.ops.skew import num_entries
from tests.poetx.kernels.accuracy import DTYPES, assert_as_accurate, to

pytest.importorskip("triton")
from hf_poetx.kernels import poetx_linear as kernels
from hf_poetx.kernels.launch import dot_precision


def make(in_features, out_features, block, group_in, group_out, dtype, tokens=24):
    def rotation(width, group):
        size = min(block, width)
        full, rest = divmod(width, size)
        permutation = (torch.randperm(width // group)[:, None] * group + torch.arange(group)).flatten().int()
        tail = 0.1 * torch.randn(1, num_entries(rest)) if rest > 1 else None
        return [0.05 * torch.randn(full, num_entries(size)), tail, permutation, group]

    x, weight = torch.randn(tokens, in_features), torch.randn(out_features, in_features) / in_features**0.5
    activations = to((x, weight, torch.randn(out_features)), dtype)
    return activations, rotation(in_features, group_in) + rotation(out_features, group_out)


def cast(rotations, *args):
    return [to([each], *args)[0] if isinstance(each, torch.Tensor) else each for each in rotations]


@pytest.mark.parametrize("memory_mode", ["fast", "mem"])
@pytest.mark.parametrize("groups", [(16, 16), (1, 1), (1, 16), (16, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_and_its_gradients_are_as_accurate_as_the_cpu(memory_mode, groups, dtype, kernel_device):
    (x, weight, bias), rotations = make(96, 64, 32, *groups, dtype)
    gradient = torch.randn(x.shape[0], 64).to(dtype)

    def run(forward, backward, activations, gradient, rotations):
        x, weight, bias = activations
        result, kept = forward(x, weight, bias, *rotations)
        kept = kept if memory_mode == "fast" else None
        return [result, *backward(gradient, x, kept, weight, *rotations, [True] * 4)]

    on_cpu = (ops._linear, ops._linear_backward)
    truth = run(*on_cpu, to((x, weight, bias), torch.float64), gradient.double(), cast(rotations, torch.float64))
    yardstick = run(*on_cpu, (x, weight, bias), gradient, rotations)
    device = kernel_device
    found = run(
        kernels.forward, kernels.backward, to((x, weight, bias), device), gradient.to(device), cast(rotations, device)
    )
    assert [each.shape for each in found] == [each.shape for each in truth]
    for each, measure, expected in zip(found, yardstick, truth, strict=True):
        assert each.is_contiguous()
        assert_as_accurate(each, measure, expected, dtype)


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, False, True, False), (False, True, False, True)]
)
def test_only_needed_gradients_are_returned_in_order(needs, kernel_device):
    activations, rotations = make(72, 40, 32, 8, 8, torch.float32)
    x, weight, bias = to(activations, kernel_device)
    rotations = cast(rotations, kernel_device)
    gradient = torch.randn(x.shape[0], 40, device=kernel_device)
    _, kept = kernels.forward(x, weight, bias, *rotations)
    everything = kernels.backward(gradient, x, kept, weight, *rotations, [True] * 4)
    parts = [everything[0:1], everything[1:2], everything[2:4], everything[4:6]]
    expected = [tensor for part, needed in zip(parts, needs, strict=True) if needed for tensor in part]
    found = kernels.backward(gradient, x, kept, weight, *rotations, list(needs))
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert torch.equal(each, wanted)


@pytest.mark.parametrize("group", [1, 16])
def test_no_tokens_give_zero_gradients(group, kernel_device):
    activations, rotations = make(64, 32, 32, group, group, torch.float32, tokens=0)
    x, weight, bias = to(activations, kernel_device)
    rotations = cast(rotations, kernel_device)
    result, kept = kernels.forward(x, weight, bias, *rotations)
    assert result.shape == (0, 32)
    gradients = kernels.backward(result, x, kept, weight, *rotations, [True] * 4)
    assert [each.shape for each in gradients[1:]] == [bias.shape, rotations[0].shape, rotations[4].shape]
    assert all(each.abs().sum() == 0 for each in gradients)


def test_different_block_sizes_of_the_two_sides_work(kernel_device):
    activations, rotations = make(64, 24, 32, 16, 8, torch.float32)
    x, weight, bias = to(activations, kernel_device)
    on_device = cast(rotations, kernel_device)
    gradient = torch.randn(x.shape[0], 24, device=kernel_device)
    result, kept = kernels.forward(x, weight, bias, *on_device)
    found = [result, *kernels.backward(gradient, x, kept, weight, *on_device, [True] * 4)]
    result, kept = ops._linear(*activations, *rotations)
    x, weight, _ = activations
    expected = [result, *ops._linear_backward(gradient.cpu(), x, kept, weight, *rotations, [True] * 4)]
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 brought the newer switch")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_either_of_the_two_switches_of_tf32_is_followed(precision, kernel_device, monkeypatch):
    """transformers sets the newer one for `tf32=True` and `torch_compile=True`, and the older raises then."""
    (x, weight, _), rotations = make(96, 64, 32, 16, 16, torch.float32)
    x, weight, rotations = x.to(kernel_device), weight.to(kernel_device), cast(rotations, kernel_device)
    expected, _ = kernels.forward(x, weight, None, *rotations)
    monkeypatch.setattr(torch.backends, "fp32_precision", precision)
    assert dot_precision(torch.float32) == precision and dot_precision(torch.bfloat16) == "ieee"
    result, kept = kernels.forward(x, weight, None, *rotations)
    kernels.backward(torch.ones_like(result), x, kept, weight, *rotations, [True, False, True, True])
    # Three products in sequence, each of operands with 10 bits.
    assert (result - expected).norm() <= 3 * 2.0**-10 * expected.norm()
