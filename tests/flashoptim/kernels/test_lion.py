"""Lion's kernel against the op's CPU implementation."""

import pytest
import torch

from hf_flashoptim.kernels.lion import lion_step
from hf_flashoptim.ops.lion import lion_step_eager
from tests.conftest import INTERPRETED
from tests.flashoptim.kernels.step_checks import SHAPES, assert_moments_match, assert_weights_match, masters, run_both
from tests.flashoptim.ops.step_inputs import KINDS, assert_same
from tests.flashoptim.ops.test_lion import inputs


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_equals_the_oracle(dtype, error_dtype, quantized, maximize, kernel_device):
    """On a GPU bit for bit; the interpreter rounds fused multiply-adds twice."""
    args = inputs(dtype, error_dtype, quantized, maximize=maximize, shapes=SHAPES)
    for _ in range(2):
        expected, actual = run_both(lion_step, lion_step_eager, args, kernel_device)
        if not INTERPRETED:
            assert_same(expected, actual)
        unit = torch.finfo(dtype).eps * (2.0**-8 if error_dtype is not None else 1.0)
        assert_weights_match(*(masters(a[0], a[4]) for a in (args, expected, actual)), unit)
        assert_moments_match(expected[2], expected[3], actual[2], actual[3])
        args = expected


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_non_finite_gradients_are_not_hidden_by_the_sign(bad, kernel_device):
    args = inputs(torch.bfloat16, torch.int8, True, shapes=SHAPES)
    args[1][0][3, 40] = bad
    expected, actual = run_both(lion_step, lion_step_eager, args, kernel_device)
    assert torch.equal(actual[0][0].isfinite(), expected[0][0].isfinite())
    assert not actual[0][0][3, 40].isfinite()
    assert actual[0][0].isfinite().sum() == actual[0][0].numel() - 1
    assert torch.equal(actual[3][0].isnan(), expected[3][0].isnan())


def test_learning_rate_0_changes_no_bit_of_weights_and_error_bits(kernel_device):
    args = inputs(torch.bfloat16, torch.int8, True, lr=0.0, shapes=SHAPES)
    _, actual = run_both(lion_step, lion_step_eager, args, kernel_device)
    for before, now in zip(args[0] + args[4], actual[0] + actual[4], strict=True):
        assert torch.equal(before.view(torch.int8), now.view(torch.int8))
