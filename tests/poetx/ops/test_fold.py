import itertools

import pytest
import torch

from hf_poetx.ops.fold import fold, folding_pays
from hf_poetx.rotation import rotated_weight
from tests.poetx.ops.test_poetx_linear import make, make_rotation


def test_folded_weight_is_the_one_that_a_merge_writes():
    _, weight, _, rotation_in, rotation_out = make()
    expected = rotated_weight(weight, rotation_in, rotation_out, exact=False)
    torch.testing.assert_close(fold(weight, *rotation_in, *rotation_out), expected)


def test_at_the_start_the_folded_weight_is_the_weight():
    weight = torch.randn(14, 11).bfloat16()
    rotation_in, rotation_out = [make_rotation(width, 4, torch.float32, scale=0.0) for width in (11, 14)]
    assert torch.equal(fold(weight, *rotation_in, *rotation_out), weight)


def test_operators_follow_the_rules_of_torch_library():
    _, weight, _, rotation_in, rotation_out = make(dtype=torch.float32)
    rotations = [t.detach() if isinstance(t, torch.Tensor) else t for t in (*rotation_in, *rotation_out)]
    torch.library.opcheck(torch.ops.poetx.fold.default, (weight, *rotations))
    for needs in ([True, True], [False, True]):
        arguments = (torch.randn_like(weight), weight, *rotations, needs)
        torch.library.opcheck(torch.ops.poetx.fold_backward.default, arguments)


@pytest.mark.parametrize("memory_mode", ["fast", "mem"])
@pytest.mark.parametrize("device_type, block, tokens", [("cpu", 64, 4096), ("cuda", 256, 16384)])
def test_folding_pays_with_many_tokens_and_narrow_layers(device_type, block, tokens, memory_mode):
    assert folding_pays(tokens, 256, 512, block, device_type, memory_mode)
    assert not folding_pays(tokens // 32, 256, 512, block, device_type, memory_mode)


@pytest.mark.parametrize("device_type, block", [("cpu", 64), ("cuda", 256)])
def test_in_wide_layers_the_third_product_costs_more_than_rotating_unless_that_takes_a_third_one_as_well(
    device_type, block
):
    assert not folding_pays(1 << 20, 8192, 8192, block, device_type, "fast")
    assert folding_pays(1 << 20, 8192, 8192, block, device_type, "mem")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_folded_weight_is_never_larger_than_the_product_that_rotating_keeps(device_type):
    sizes = [2**i for i in range(4, 15)]
    for tokens, in_features, out_features, block in itertools.product(sizes, sizes, sizes, (16, 256)):
        if folding_pays(tokens, in_features, out_features, block, device_type):
            assert in_features * out_features <= tokens * out_features
