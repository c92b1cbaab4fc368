"""One wrapped linear layer against its definition in dense matrices, over widths, blocks, dtypes and shapes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_poetx import PoetXConfig, get_poetx_model
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.linear import PoetXLinear
from hf_poetx.ops.skew import unpack_skew
from tests.poetx.helpers import randomize_skew

few = settings(max_examples=25, deadline=None, derandomize=True)
widths = st.integers(1, 23)
blocks = st.integers(2, 26)
shapes = st.sampled_from([(5,), (0,), (2, 3), (2, 0), (3, 1, 2), ()])


def make_base(in_features: int, out_features: int, bias: bool = True, transposed: bool = False) -> nn.Module:
    base = Conv1D(out_features, in_features) if transposed else nn.Linear(in_features, out_features, bias)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_()
    return base


def wrap(base: nn.Module, sigma: float = 0.0, **config) -> PoetXLinear:
    """The layer that takes the place of `base`."""
    model = get_poetx_model(nn.Sequential(base), PoetXConfig(target_modules=["0"], **{"merge_interval": 0} | config))
    randomize_skew(model, sigma)
    return model.base_model.model[0]


def dense_rotation(layer: PoetXLinear, side: str) -> Tensor:
    """``P^T diag(blocks) P`` of a side as a matrix, from the definition: I + 2Q + 2Q^2 + 2Q^3 + Q^4 for each block."""
    width = layer.width(side)
    rotation = layer.rotation("default", side)
    if rotation is None:
        return torch.eye(width, dtype=layer.get_base_layer().weight.dtype)
    skews = [*unpack_skew(rotation.entries)] + ([] if rotation.tail is None else [*unpack_skew(rotation.tail)])
    blocks = []
    for skew in skews:
        identity = torch.eye(len(skew), dtype=skew.dtype)
        blocks.append(identity + 2 * skew + 2 * skew @ skew + 2 * skew @ skew @ skew + skew @ skew @ skew @ skew)
    covered = sum(map(len, blocks))
    diagonal = torch.block_diag(*blocks, *[torch.ones(1, 1, dtype=blocks[0].dtype)] * (width - covered))
    permutation = rotation.permutation.long()
    natural = torch.zeros_like(diagonal)
    natural[permutation[:, None], permutation[None, :]] = diagonal
    return natural


def dense_forward(layer: PoetXLinear, x: Tensor) -> Tensor:
    base = layer.get_base_layer()
    weight = base.weight.mT if layer.transposed else base.weight
    result = x @ dense_rotation(layer, "in") @ weight.mT @ dense_rotation(layer, "out")
    return result if base.bias is None else result + base.bias


@few
@given(
    in_features=widths, out_features=widths, block=blocks, bias=st.booleans(), transposed=st.booleans(), shape=shapes,
    mode=st.sampled_from(["fast", "mem"]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_a_fresh_layer_gives_what_the_plain_one_gives(
    in_features, out_features, block, bias, transposed, shape, mode, dtype
):
    base = make_base(in_features, out_features, bias, transposed).to(dtype)
    x = torch.randn(*shape, in_features).to(dtype)
    before = base(x)
    after = wrap(base, block=block, memory_mode=mode)(x)
    assert after.dtype == before.dtype and after.shape == before.shape
    # The same products, but a kernel may take those of a vector in another order: one rounding of a sum.
    tolerance = 4 * torch.finfo(dtype).eps * in_features**0.5
    assert torch.allclose(after, before, rtol=tolerance, atol=tolerance * 4)


@few
@given(
    in_features=widths, out_features=widths, block=blocks, bias=st.booleans(), transposed=st.booleans(), shape=shapes,
    mode=st.sampled_from(["fast", "mem"]), group=st.integers(1, 4),
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_the_definition(
    in_features, out_features, block, bias, transposed, shape, mode, group
):
    layer = wrap(
        make_base(in_features, out_features, bias, transposed), 0.3, block=block, memory_mode=mode,
        permutation_group=group, train_rest=bias,
    ).double()  # fmt: skip
    x = torch.randn(*shape, in_features, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    outputs, direction = layer(x), torch.randn(*shape, out_features, dtype=torch.float64)
    expected = dense_forward(layer, x)
    assert torch.allclose(outputs, expected, atol=1e-10)
    references = torch.autograd.grad(expected, inputs, direction)
    for ours, reference in zip(torch.autograd.grad(outputs, inputs, direction), references, strict=True):
        assert torch.allclose(ours, reference, atol=1e-10)


@few
@given(in_features=widths, out_features=widths, block=blocks, bias=st.booleans(), transposed=st.booleans())
def test_a_merged_layer_gives_what_the_unmerged_one_gives(in_features, out_features, block, bias, transposed):
    layer = wrap(make_base(in_features, out_features, bias, transposed), 0.3, block=block)
    x = torch.randn(6, in_features)
    before = layer(x)
    layer.merge()
    # fp32 sums of two widths and two blocks of terms of the size of one.
    assert torch.allclose(layer(x), before, atol=1e-5 * (in_features + out_features))


@few
@given(in_features=widths, out_features=widths, block=blocks, transposed=st.booleans(), sigma=st.floats(0.01, 0.5))
def test_a_periodic_merge_keeps_the_spectrum_and_changes_the_function_by_its_jump(
    in_features, out_features, block, transposed, sigma
):
    layer = wrap(make_base(in_features, out_features, True, transposed), sigma, block=block)
    x = torch.randn(6, in_features)
    before, start = layer(x), torch.linalg.svdvals(layer.base_weight())
    expected = layer.effective_weight("default", exact=True)
    report = layer.merge_then_reinitialize("default")
    # Scaled to the norm at the start: two roundings in fp32.
    assert torch.allclose(layer.base_weight(), expected, rtol=1e-5, atol=0)
    assert torch.allclose(torch.linalg.svdvals(layer.base_weight()), start, atol=1e-5 * start.max().item())
    # Both rotations miss orthogonality by about sigma^4 each, and so does the polynomial the exact transform.
    assert report.jump <= 3 * report.sigma**4 + 1e-6
    bound = report.jump * start.norm().item() * x.norm(dim=1).max().item()
    assert (layer(x) - before).norm(dim=1).max().item() <= 1.1 * bound + 1e-4
    assert int(layer.poetx_merge_count["default"]) == 1
    assert all(not p.any() for p in layer.skew_parameters("default"))


def test_the_transposed_exact_transform_is_another_one():
    """Signs and order: an inverse rotation would pass every test of orthogonality."""
    layer = wrap(make_base(16, 16), 0.3, block=8)
    exact, polynomial = (layer.effective_weight("default", exact=exact) for exact in (True, False))
    with torch.no_grad():
        for parameter in layer.skew_parameters("default"):
            parameter.neg_()
    transposed = layer.effective_weight("default", exact=True)
    assert (exact - polynomial).norm() < 0.05 * exact.norm() < (transposed - polynomial).norm()


def test_a_side_of_one_column_has_no_rotation():
    layer = wrap(make_base(1, 9), 0.3, block=4)
    assert layer.rotation("default", "in") is None and len(layer.skew_parameters("default")) == 1
    x = torch.randn(3, 1)
    assert torch.allclose(layer(x), dense_forward(layer, x), atol=1e-5)


def test_a_layer_of_one_column_on_both_sides_still_trains_nothing_and_merges():
    layer = wrap(make_base(1, 1), block=4)
    assert layer.skew_parameters("default") == []
    before = layer(torch.ones(2, 1))
    assert layer.merge_then_reinitialize("default").sigma == 0
    assert torch.equal(layer(torch.ones(2, 1)), before)


def test_a_weight_of_zeros_merges_without_a_jump():
    base = nn.Linear(6, 6)
    nn.init.zeros_(base.weight)
    assert wrap(base, 0.3, block=3).merge_then_reinitialize("default").jump == 0


def test_weights_stay_in_natural_order():
    base = make_base(12, 10)
    before = base.weight.detach().clone()
    layer = wrap(base, block=4, permutation_group=1)
    assert torch.equal(layer.get_base_layer().weight, before)
    assert not torch.equal(layer.poetx_permutation_in["default"], torch.arange(12).int())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_hooked_base_layer_is_run_itself_and_a_fresh_wrap_still_changes_nothing(bias, transposed):
    base = make_base(12, 10, bias, transposed)
    x = torch.randn(4, 12)
    before, seen = base(x), []
    base.register_forward_hook(lambda module, inputs, output: seen.append(output))
    layer = wrap(base, block=5)
    assert torch.equal(layer(x), before) and len(seen) == 1
    model = randomize_skew(nn.Sequential(layer), 0.3)
    assert torch.allclose(model(x), dense_forward(layer, x), atol=1e-4)


def test_bias_is_trained_in_place_outside_of_the_rotations_on_both_paths():
    gradients = []
    for hooked in (False, True):
        base = make_base(8, 8)
        with torch.no_grad():
            base.weight.copy_(torch.arange(64.0).view(8, 8) / 64)
        if hooked:
            base.register_forward_hook(lambda *_: None)
        layer = wrap(base, 0.3, block=4, train_rest=True)
        layer(torch.ones(3, 8)).square().sum().backward()
        gradients.append((layer.bias.grad, layer.bias.detach().clone(), layer(torch.ones(3, 8)).detach()))
    for gradient, _, output in gradients:
        assert torch.allclose(gradient, 2 * output.sum(0), rtol=1e-5)


def test_permutations_ignore_and_leave_the_global_random_state():
    torch.manual_seed(1)
    first = wrap(make_base(12, 10), block=4).poetx_permutation_in["default"]
    base = make_base(12, 10)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = wrap(base, block=4).poetx_permutation_in["default"]
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_permutations_differ_by_layer_side_seed_and_merge():
    config = PoetXConfig(block=4, target_modules=["0", "1"], merge_interval=5, permutation_group=1)
    model = get_poetx_model(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)), config)
    drawn = [p for _, layer in poetx_layers(model) for p in _permutations(layer)]
    for _, layer in poetx_layers(model):
        layer.reinitialize("default")
    drawn += [p for _, layer in poetx_layers(model) for p in _permutations(layer)]
    drawn += _permutations(wrap(nn.Linear(24, 24), block=4, seed=1, permutation_group=1))
    assert len({tuple(p.tolist()) for p in drawn}) == len(drawn) == 10
    assert all(p.dtype == torch.int32 and sorted(p.tolist()) == list(range(24)) for p in drawn)


def _permutations(layer: PoetXLinear) -> list[Tensor]:
    return [getattr(layer, f"poetx_permutation_{side}")["default"].clone() for side in ("in", "out")]


def test_error_bits_keep_a_merged_weight_to_24_bits():
    base = make_base(24, 18).to(torch.bfloat16)
    layer = wrap(base, 0.3, block=6, base_error_bits=8)
    expected = layer.effective_weight("default", exact=True)
    layer.merge_then_reinitialize("default")
    assert layer.get_base_layer().weight.dtype == torch.bfloat16
    # To 24 bits, and the scaling to the norm at the start.
    assert torch.allclose(layer.base_weight("default"), expected, rtol=2**-15 + 1e-6, atol=0)
    assert not torch.allclose(layer.base_weight().float(), expected, rtol=2**-10, atol=0)


def test_error_bits_of_a_transposed_weight_are_kept_in_its_layout():
    layer = wrap(make_base(24, 18, transposed=True).to(torch.bfloat16), 0.3, block=6, base_error_bits=8)
    expected = layer.effective_weight("default", exact=True)
    layer.merge_then_reinitialize("default")
    # To 24 bits, and the scaling to the norm at the start.
    assert torch.allclose(layer.base_weight("default"), expected, rtol=2**-15 + 1e-6, atol=0)


def test_error_bits_need_a_bfloat16_weight():
    with pytest.raises(ValueError, match=r"base_error_bits=8 .*torch.float32; load the model in bfloat16"):
        wrap(make_base(8, 8), block=4, base_error_bits=8)


def test_normalizing_gives_every_output_the_norm_one():
    for transposed in (False, True):
        base = make_base(9, 7, transposed=transposed)
        natural = (base.weight.mT if transposed else base.weight).detach().clone()
        layer = wrap(base, block=4, init="normalize")
        assert torch.allclose(layer.base_weight(), F.normalize(natural, dim=1), atol=1e-6)
    zeros = nn.Linear(4, 4)
    nn.init.zeros_(zeros.weight)
    assert not wrap(zeros, block=4, init="normalize").base_weight().any()
