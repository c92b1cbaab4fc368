import itertools

import pytest
import torch
import torch.nn.functional as F

from hf_poetx.ops.fold import fold, folding_pays
from hf_poetx.ops.poetx_linear import poetx_linear
from hf_poetx.rotation import rotated_weight
from tests.poetx.ops.test_poetx_linear import flat_inputs, make, make_rotation


def test_plain_layer_with_the_folded_weight_equals_the_rotated_one_with_all_gradients():
    x, weight, bias, rotation_in, rotation_out = make()
    inputs = flat_inputs(x, bias, rotation_in, rotation_out)
    expected = poetx_linear(x, weight, bias, rotation_in, rotation_out, "fast")
    result = F.linear(x, fold(weight, rotation_in, rotation_out), bias)
    torch.testing.assert_close(result, expected)
    gradient = torch.randn_like(result)
    expected_gradients, gradients = (torch.autograd.grad(out, inputs, gradient) for out in (expected, result))
    for wanted, found in zip(expected_gradients, gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_folded_weight_is_the_one_that_a_merge_writes():
    _, weight, _, rotation_in, rotation_out = make()
    expected = rotated_weight(weight, rotation_in, rotation_out, exact=False)
    torch.testing.assert_close(fold(weight, rotation_in, rotation_out), expected)


def test_at_the_start_the_folded_weight_is_the_weight():
    weight = torch.randn(14, 11).bfloat16()
    rotations = [make_rotation(width, 4, torch.float32, scale=0.0) for width in (11, 14)]
    assert torch.equal(fold(weight, *rotations), weight)


def test_weight_and_entries_are_all_that_is_kept():
    _, weight, _, *rotations = make(dtype=torch.float32)
    given = {t.data_ptr() for t in (weight, *(t for r in rotations for t in r[:3] if t is not None))}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fold(weight, *rotations)
    assert saved and {t.data_ptr() for t in saved} == given


@pytest.mark.parametrize("frozen", [0, 1])
def test_no_gradient_for_a_rotation_that_needs_none(frozen):
    _, weight, _, *rotations = make()
    rotations[frozen] = rotations[frozen]._replace(entries=rotations[frozen].entries.detach(), tail=None)
    fold(weight, *rotations).square().sum().backward()
    assert rotations[1 - frozen].entries.grad.abs().sum() > 0


def test_operators_follow_the_rules_of_torch_library():
    _, weight, _, rotation_in, rotation_out = make(dtype=torch.float32)
    rotations = [t.detach() if isinstance(t, torch.Tensor) else t for t in (*rotation_in, *rotation_out)]
    torch.library.opcheck(torch.ops.poetx.fold.default, (weight, *rotations))
    for needs in ([True, True], [False, True]):
        arguments = (torch.randn_like(weight), weight, *rotations, needs)
        torch.library.opcheck(torch.ops.poetx.fold_backward.default, arguments)


def test_full_graph_compile_gives_the_same_result():
    _, weight, _, rotation_in, rotation_out = make()
    inputs = flat_inputs(torch.zeros(1), torch.zeros(1), rotation_in, rotation_out)[2:]
    compiled = torch.compile(fold, fullgraph=True, backend="aot_eager")
    outputs = [f(weight, rotation_in, rotation_out) for f in (fold, compiled)]
    torch.testing.assert_close(outputs[0], outputs[1])
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in outputs]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device_type, block, tokens", [("cpu", 64, 4096), ("cuda", 256, 16384)])
def test_folding_pays_with_many_tokens_and_narrow_layers(device_type, block, tokens):
    assert folding_pays(tokens, 256, 512, block, device_type)
    assert not folding_pays(tokens // 32, 256, 512, block, device_type)
    assert not folding_pays(1 << 20, 8192, 8192, block, device_type), "its third product costs more than all rotations"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_folded_weight_is_never_larger_than_the_product_that_rotating_keeps(device_type):
    sizes = [2**i for i in range(4, 15)]
    for tokens, in_features, out_features, block in itertools.product(sizes, sizes, sizes, (16, 256)):
        if folding_pays(tokens, in_features, out_features, block, device_type):
            assert in_features * out_features <= tokens * out_features
