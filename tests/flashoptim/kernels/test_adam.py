"""Adam's kernel against the op's CPU implementation."""

import pytest
import torch

from hf_flashoptim.kernels import launch, table
from hf_flashoptim.kernels.adam import adam_step
from hf_flashoptim.ops.adam import adam_step_eager
from tests.flashoptim.kernels.step_checks import (
    SHAPES,
    assert_moments_match,
    assert_weights_match,
    masters,
    on,
    run_both,
)
from tests.flashoptim.ops.step_inputs import KINDS, clone
from tests.flashoptim.ops.test_adam import inputs

UNITS = {None: 1.0, torch.int8: 2.0**-8, torch.int16: 2.0**-16}


def assert_matches(before, expected, actual):
    error_dtype = before[6][0].dtype if before[6] else None
    unit = torch.finfo(before[0][0].dtype).eps * UNITS[error_dtype]
    assert_weights_match(*(masters(args[0], args[6]) for args in (before, expected, actual)), unit)
    assert_moments_match(expected[2], expected[3], actual[2], actual[3])
    assert_moments_match(expected[4], expected[5], actual[4], actual[5])
    assert all(torch.equal(e, a) for e, a in zip(expected[7], actual[7], strict=True))


VARIANTS = [
    pytest.param({}, id="adamw"),
    pytest.param({"decoupled": False, "maximize": True}, id="adam-maximize"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_equals_the_oracle(dtype, error_dtype, quantized, variant, kernel_device):
    args = inputs(dtype, error_dtype, quantized, shapes=SHAPES, **variant)
    if variant:  # gradients that the decay adds to: where both cancel, fp32 does not know the sign of the update
        args[1] = [-p * (torch.rand(p.shape) + 0.5).to(dtype) for p in args[0]]
    for _ in range(2):
        expected, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
        assert_matches(args, expected, actual)
        args = expected


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "fp32-moments"])
def test_unaligned_tensors_and_mixed_gradient_dtypes(quantized, kernel_device):
    args = inputs(torch.bfloat16, torch.int8, quantized, shapes=[(4, 32), (4, 32), (33,)][: 2 if quantized else 3])
    args[1][1] = args[1][1].float()
    on_device = on(kernel_device, args)
    storage = torch.zeros(129, dtype=torch.bfloat16, device=kernel_device)
    on_device[0][0] = storage[1:].view(4, 32).copy_(on_device[0][0])
    adam_step(*on_device)
    expected = clone(args)
    adam_step_eager(*expected)
    assert_matches(args, expected, on(torch.device("cpu"), on_device))
    assert storage[0] == 0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_non_finite_gradients_poison_only_their_group(dtype, error_dtype, quantized, bad, kernel_device):
    args = inputs(dtype, error_dtype, quantized, shapes=[(4, 64)])
    args[1][0][1, 40] = bad
    for _ in range(2):
        expected, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
        weights = masters(actual[0], actual[6])[0]
        assert not weights[1, 40].isfinite()
        untouched = torch.ones_like(weights, dtype=torch.bool)
        untouched[1, 32:] = False
        assert weights[untouched].isfinite().all()
        assert torch.equal(weights.isfinite(), masters(expected[0], expected[6])[0].isfinite())
        if quantized:
            assert torch.equal(actual[3][0].isnan(), expected[3][0].isnan())
            assert torch.equal(actual[5][0].isnan(), expected[5][0].isnan())
        args = expected


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_learning_rate_0_changes_no_bit_of_weights_and_error_bits(dtype, error_dtype, quantized, kernel_device):
    args = inputs(dtype, error_dtype, quantized, lr=0.0, shapes=[(4, 64)])
    args[0][0][0, :2] = torch.tensor([-0.0, 0.0])
    args[1][0][0, 0] = float("nan")
    _, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
    for before, now in zip(args[0] + args[6], actual[0] + actual[6], strict=True):
        assert torch.equal(before.view(torch.int8), now.view(torch.int8))
    assert not torch.equal(args[2][0], actual[2][0])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30], ids=str)
@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "fp32-moments"])
def test_squares_of_extreme_gradients_neither_vanish_nor_overflow(scale, quantized, kernel_device):
    args = inputs(torch.float32, None, quantized, shapes=[(4, 64)], weight_decay=0.0)
    args[0][0].zero_()
    args[1][0].fill_(scale)
    args[11] = 1e-37 if scale < 1 else 1e-8
    on_device = on(kernel_device, args)
    # An fp32 second moment below 1e-19 squared vanishes, and one above fp32's range saturates; codes of its root do not.
    steps = 5 if quantized else 1
    for _ in range(steps):
        adam_step(*on_device)
    expected = torch.full((4, 64), -1e-3 * steps)
    torch.testing.assert_close(on_device[0][0].cpu(), expected, rtol=0.02, atol=0)


def test_zero_groups_stay_zero_and_eps_0_leaves_their_weights(kernel_device):
    args = inputs(torch.float32, None, True, shapes=[(2, 64)], weight_decay=0.0)
    args[1][0][0].zero_()
    args[11] = 0.0
    for _ in range(2):
        expected, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
        assert torch.equal(actual[0][0][0], args[0][0][0])
        assert not actual[4][0][0].any()
        assert_matches(args, expected, actual)
        args = expected


def test_a_tiny_gradient_beside_a_huge_one_keeps_its_variance(kernel_device):
    args = inputs(torch.float32, None, True, shapes=[(1, 32)], weight_decay=0.0)
    args[1][0].fill_(1e-4)[0, 0] = 1.0
    args[1][0][0, 1] = 1e-30
    _, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
    assert (actual[4][0] >= 1).all()


def test_three_hundred_tensors_take_a_handful_of_launches(kernel_device, monkeypatch):
    shapes = [(1, 64)] * 150 + [(2, 32)] * 150
    args = on(kernel_device, inputs(torch.bfloat16, torch.int8, True, shapes=shapes))
    launches = []

    def counted(kernel, programs, *rest, **options):
        launches.append(programs)
        if programs == 1:  # not the step itself: interpreted, 300 programs take minutes
            launch.launch(kernel, programs, *rest, **options)

    monkeypatch.setattr(table, "launch", counted)
    adam_step(*args)
    steps = [programs for programs in launches if programs > 1]
    assert steps == [300]
    assert len(launches) <= 15, "256 addresses or sizes a launch, and the step"


def test_learning_rate_step_and_hyperparameters_compile_nothing(kernel_device, monkeypatch):
    args = on(kernel_device, inputs(torch.bfloat16, torch.int8, True, shapes=[(2, 32)]))
    compiled = set()

    def recorded(kernel, programs, arguments, constants, *rest, **options):
        compiled.add((kernel, constants))
        launch.launch(kernel, programs, arguments, constants, *rest, **options)

    monkeypatch.setattr(table, "launch", recorded)
    for step, lr in enumerate((1e-3, 1.0, 16.0, 0.0)):
        args[7][0].fill_([0, 1, 15, 1 << 20][step])
        args[8] = torch.tensor(lr)
        args[9:13] = [0.9, 0.999 + step * 1e-4, 10.0**-step, 0.1 * (step + 1)]
        adam_step(*args)
    assert len(compiled) == 2


def test_empty_tensors_only_count_their_steps(kernel_device):
    args = inputs(torch.bfloat16, torch.int8, True, shapes=[(0, 64)])
    expected, actual = run_both(adam_step, adam_step_eager, args, kernel_device)
    assert_matches(args, expected, actual)
    assert actual[7][0] == 1
