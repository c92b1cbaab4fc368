"""SGD's kernel against the op's CPU implementation."""

import pytest
import torch

from hf_flashoptim.kernels.sgd import sgd_step
from hf_flashoptim.ops.sgd import sgd_step_eager
from tests.conftest import INTERPRETED
from tests.flashoptim.kernels.step_checks import SHAPES, assert_moments_match, assert_weights_match, masters, run_both
from tests.flashoptim.ops.step_inputs import KINDS, assert_same
from tests.flashoptim.ops.test_sgd import inputs

VARIANTS = [
    pytest.param({"momentum": 0.0}, id="plain"),
    pytest.param({"dampening": 0.3, "decoupled": True}, id="dampening-sgdw"),
    pytest.param({"nesterov": True, "maximize": True}, id="nesterov-maximize"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_equals_the_oracle(dtype, error_dtype, quantized, variant, kernel_device):
    """On a GPU bit for bit; the interpreter rounds fused multiply-adds twice."""
    args = inputs(dtype, error_dtype, quantized, shapes=SHAPES, **variant)
    for _ in range(2):
        expected, actual = run_both(sgd_step, sgd_step_eager, args, kernel_device)
        if not INTERPRETED:
            assert_same(expected, actual)
        unit = torch.finfo(dtype).eps * (2.0**-8 if error_dtype is not None else 1.0)
        assert_weights_match(*(masters(a[0], a[4]) for a in (args, expected, actual)), unit)
        assert_moments_match(expected[2], expected[3], actual[2], actual[3])
        assert all(torch.equal(e, a) for e, a in zip(expected[5], actual[5], strict=True))
        args = expected
