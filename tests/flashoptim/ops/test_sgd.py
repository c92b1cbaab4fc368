"""The SGD op against ``torch.optim.SGD``, and what it promises at the edges."""

import pytest
import torch

from hf_flashoptim.ops import layout
from hf_flashoptim.ops.error_correction import reconstruct_master_weight
from hf_flashoptim.ops.sgd import sgd_step
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


def inputs(
    dtype,
    error_dtype,
    quantized,
    *,
    momentum=0.9,
    dampening=0.0,
    nesterov=False,
    decoupled=False,
    maximize=False,
    shapes=SHAPES,
):
    params, grads = parameters(dtype, shapes), parameters(dtype, shapes)
    moments = moments_for(params, quantized, torch.int8) if momentum else ([], [])
    steps = [torch.zeros(()) for _ in params] if momentum else []
    rate = torch.tensor(1e-2, dtype=torch.float64)
    hyper = [rate, momentum, dampening, 0.1, nesterov, decoupled, maximize]
    return [params, grads, *moments, errors_for(params, error_dtype), steps, *hyper]


VARIANTS = [
    pytest.param({"momentum": 0.0}, id="plain"),
    pytest.param({"dampening": 0.3}, id="dampening"),
    pytest.param({"nesterov": True}, id="nesterov"),
    pytest.param({"maximize": True}, id="maximize"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS[:2])
def test_opcheck(dtype, error_dtype, quantized, variant):
    torch.library.opcheck(sgd_step, clone(inputs(dtype, error_dtype, quantized, **variant)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_steps_equal_torch(variant):
    """fp32 weights and buffers: only the order of roundings in fp32 differs."""
    args = inputs(torch.float32, None, False, **variant)
    params = [torch.nn.Parameter(p.double()) for p in args[0]]
    reference = torch.optim.SGD(params, lr=1e-2, weight_decay=0.1, **{"momentum": 0.9, **variant})
    for _ in range(4):
        args[1] = [torch.randn_like(g) for g in args[1]]
        for p, g in zip(params, args[1], strict=True):
            p.grad = g.double()
        reference.step()
        sgd_step(*args)
    for ours, theirs in zip(args[0], params, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_decoupled_decay_leaves_the_gradient_alone(dtype, error_dtype, quantized, variant):
    args = inputs(dtype, error_dtype, quantized, decoupled=True, **variant)
    after = run(sgd_step, args)
    sign = -1 if variant.get("maximize") else 1
    factor = 1.9 if variant.get("nesterov") else 1.0
    for index, (before, grad) in enumerate(zip(args[0], args[1], strict=True)):
        now = after[0][index]
        now = now.float() if error_dtype is None else reconstruct_master_weight(now, after[4][index])
        expected = before.double() * (1 - 1e-3) - 1e-2 * sign * factor * grad.double()
        unit = torch.finfo(dtype).eps / (1 if error_dtype is None else 256)
        torch.testing.assert_close(now.double(), expected, rtol=unit, atol=1e-7)


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_chunks_do_not_change_a_bit(dtype, error_dtype, quantized, monkeypatch):
    args = run(sgd_step, inputs(dtype, error_dtype, quantized))
    whole = run(sgd_step, args)
    monkeypatch.setattr(layout, "CHUNK_SIZE", 64)
    assert_same(run(sgd_step, args), whole)


@pytest.mark.parametrize("decoupled", [True, False], ids=["sgdw", "sgd"])
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_learning_rate_0_changes_no_bit_of_weights_and_error_bits(dtype, error_dtype, quantized, decoupled):
    args = run(sgd_step, inputs(dtype, error_dtype, quantized, decoupled=decoupled))
    args[6] = torch.tensor(0.0)
    after = run(sgd_step, args)
    for before, now in zip(args[0] + args[4], after[0] + after[4], strict=True):
        assert torch.equal(before.view(torch.int8), now.view(torch.int8))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_non_finite_gradients_poison_only_their_group(dtype, error_dtype, quantized, bad):
    clean = poisoned = inputs(dtype, error_dtype, quantized)
    for _ in range(3):
        poisoned, clean = run(sgd_step, poisoned), run(sgd_step, clean)
        poisoned[1][0][3, 40] = bad
    ours, theirs = poisoned[0][0], clean[0][0]
    assert not ours[3, 40].isfinite()
    ours[3, 32:64] = theirs[3, 32:64]
    assert torch.equal(ours, theirs)
