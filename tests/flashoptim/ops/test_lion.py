"""The Lion op against its formula, and what it promises at the edges."""

import pytest
import torch

from hf_flashoptim.ops import layout
from hf_flashoptim.ops.error_correction import reconstruct_master_weight
from hf_flashoptim.ops.lion import lion_step
from tests.flashoptim.ops.step_inputs import (
    KINDS,
    SHAPES,
    assert_same,
    clone,
    errors_for,
    moments_for,
    parameters,
    run,
)


def inputs(dtype, error_dtype, quantized, *, lr=1e-3, maximize=False, shapes=SHAPES):
    params, grads = parameters(dtype, shapes), parameters(dtype, shapes)
    moments = moments_for(params, quantized, torch.int8)
    rate = torch.tensor(lr, dtype=torch.float64)
    return [params, grads, *moments, errors_for(params, error_dtype), rate, 0.9, 0.99, 0.1, maximize]


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_opcheck(dtype, error_dtype, quantized):
    torch.library.opcheck(lion_step, clone(inputs(dtype, error_dtype, quantized)))


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_first_step_equals_the_formula(dtype, error_dtype, quantized, maximize):
    args = inputs(dtype, error_dtype, quantized, maximize=maximize)
    after = run(lion_step, args)
    for index, (before, grad) in enumerate(zip(args[0], args[1], strict=True)):
        now = after[0][index]
        now = now.float() if error_dtype is None else reconstruct_master_weight(now, after[4][index])
        expected = before.double() * (1 - 1e-4) - 1e-3 * (-1 if maximize else 1) * grad.double().sign()
        unit = torch.finfo(dtype).eps / (1 if error_dtype is None else 256)
        torch.testing.assert_close(now.double(), expected, rtol=unit, atol=1e-8)


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_chunks_do_not_change_a_bit(dtype, error_dtype, quantized, monkeypatch):
    args = run(lion_step, inputs(dtype, error_dtype, quantized))
    whole = run(lion_step, args)
    monkeypatch.setattr(layout, "CHUNK_SIZE", 64)
    assert_same(run(lion_step, args), whole)


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_learning_rate_0_changes_no_bit_of_weights_and_error_bits(dtype, error_dtype, quantized):
    args = run(lion_step, inputs(dtype, error_dtype, quantized))
    args[5] = torch.tensor(0.0)
    after = run(lion_step, args)
    for before, now in zip(args[0] + args[4], after[0] + after[4], strict=True):
        assert torch.equal(before.view(torch.int8), now.view(torch.int8))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_non_finite_gradients_show_and_poison_only_their_group(dtype, error_dtype, quantized, bad):
    clean = poisoned = inputs(dtype, error_dtype, quantized)
    for _ in range(3):
        poisoned, clean = run(lion_step, poisoned), run(lion_step, clean)
        poisoned[1][0][3, 40] = bad
    ours, theirs = poisoned[0][0], clean[0][0]
    assert ours[3, 40].isnan()
    ours[3, 32:64] = theirs[3, 32:64]
    assert torch.equal(ours, theirs)
