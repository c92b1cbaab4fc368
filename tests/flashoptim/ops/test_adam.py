"""The Adam op against the formula in fp64, and what it promises at the edges."""

import math

import pytest
import torch

from hf_flashoptim.ops import layout
from hf_flashoptim.ops.adam import adam_step, largest_update
from hf_flashoptim.ops.error_correction import reconstruct_master_weight
from tests.flashoptim.ops.step_inputs import KINDS, assert_same, clone, errors_for, moments_for, parameters, run

BETA1, BETA2 = 0.9, 0.999


def inputs(dtype, error_dtype, quantized, *, lr=1e-3, weight_decay=0.1, decoupled=True, maximize=False, **kwargs):
    params = parameters(dtype, **kwargs)
    grads = parameters(dtype, **kwargs)
    first = moments_for(params, quantized, torch.int8)
    second = moments_for(params, quantized, torch.uint8)
    steps = [torch.zeros(()) for _ in params]
    state = [*first, *second, errors_for(params, error_dtype), steps]
    hyper = [torch.tensor(lr, dtype=torch.float64), BETA1, BETA2, 1e-8, weight_decay, decoupled, maximize]
    return [params, grads, *state, *hyper]


def masters(args):
    params, errors = args[0], args[6]
    if not errors:
        return [p.double() for p in params]
    return [reconstruct_master_weight(p, e).double() for p, e in zip(params, errors, strict=True)]


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_opcheck(dtype, error_dtype, quantized):
    torch.library.opcheck(adam_step, clone(inputs(dtype, error_dtype, quantized)))


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_first_step_equals_the_formula(dtype, error_dtype, quantized, decoupled, maximize):
    """Nothing has been rounded to 8 bits yet, so the first step is exact to rounding in fp32 and of the weight."""
    args = inputs(dtype, error_dtype, quantized, decoupled=decoupled, maximize=maximize)
    after = run(adam_step, args)
    for before, w, g in zip(masters(args), masters(after), args[1], strict=True):
        g = -g.double() if maximize else g.double()
        g = g if decoupled else g + 0.1 * before
        m_hat, v_hat = g, g.square()
        expected = before * (1 - 1e-3 * 0.1 if decoupled else 1) - 1e-3 * m_hat / (v_hat.sqrt() + 1e-8)
        unit = torch.finfo(dtype).eps / (1 if error_dtype is None else 256)
        # Where the gradient and the decay nearly cancel, fp32 does not know the sign of their sum.
        known = g.abs() > 1e-3
        torch.testing.assert_close(w[known], expected[known], rtol=unit, atol=1e-8)
    assert all(step == 1 for step in after[7])


@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_chunks_do_not_change_a_bit(dtype, error_dtype, quantized, monkeypatch):
    args = inputs(dtype, error_dtype, quantized)
    args = run(adam_step, args)
    whole = run(adam_step, args)
    monkeypatch.setattr(layout, "CHUNK_SIZE", 64)
    assert_same(run(adam_step, args), whole)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_learning_rate_0_changes_no_bit_of_weights_and_error_bits(dtype, error_dtype, quantized, decoupled):
    args = run(adam_step, inputs(dtype, error_dtype, quantized))
    args[0][0][0, :2] = torch.tensor([-0.0, 0.0])
    args[1][0][0, :2] = torch.tensor([-1.0, float("inf")])
    args[8] = torch.tensor(0.0)
    args[13] = decoupled
    after = run(adam_step, args)
    for before, now in zip(args[0] + args[6], after[0] + after[6], strict=True):
        assert torch.equal(before.view(torch.int8), now.view(torch.int8))
    assert not torch.equal(args[2][0], after[2][0]), "moments move on, as in torch"


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype, error_dtype, quantized", KINDS)
def test_non_finite_gradients_poison_only_their_group(dtype, error_dtype, quantized, bad):
    args = inputs(dtype, error_dtype, quantized)
    clean = poisoned = args
    for _ in range(3):
        poisoned = run(adam_step, poisoned)
        clean = run(adam_step, clean)
        poisoned[1][0][3, 40] = bad
    for index in (0, 1):
        ours, theirs = poisoned[0][index].clone(), clean[0][index]
        if index == 0:
            assert not ours[3, 40].isfinite()
            ours[3, 32:64] = theirs[3, 32:64]
        assert torch.equal(ours, theirs)


def test_a_tiny_gradient_beside_a_huge_one_does_not_explode():
    """Its variance falls below half a code of the group; with code 0 the next step would divide by nothing."""
    args = inputs(torch.float32, None, True, shapes=[(1, 32)], weight_decay=0.0)
    args[0][0].zero_()
    args[1][0].fill_(1e-4)[0, 0] = 1.0
    for _ in range(20):
        adam_step(*args)
        assert args[0][0].abs().max() <= 20 * 1e-3 * 1.01


@pytest.mark.parametrize("step", [1, 2, 7, 50, 1000])
def test_no_gradients_make_adams_update_larger_than_the_clamp(step):
    """Cauchy-Schwarz is attained by gradients g_k proportional to a_k / b_k; random ones stay below."""
    k = torch.arange(step - 1, -1, -1, dtype=torch.float64)
    a = BETA1**k * (1 - BETA1) / (1 - BETA1**step)
    b = BETA2**k * (1 - BETA2) / (1 - BETA2**step)
    bound = largest_update(step, BETA1, BETA2)
    worst = a / b
    assert ((a * worst).sum() / (b * worst.square()).sum().sqrt()).item() == pytest.approx(bound, rel=1e-9)
    grads = torch.randn(1000, step, dtype=torch.float64).exp()
    assert ((grads @ a) / (grads.square() @ b).sqrt() <= bound * (1 + 1e-12)).all()
    assert math.isinf(largest_update(step, 0.9, 0.81)) and math.isinf(largest_update(step, 0.9, 0.0))


def test_a_variance_stuck_at_its_code_does_not_let_the_update_grow():
    """Small gradients first, larger ones later, beside an element that sets the scale."""
    args = inputs(torch.float32, None, True, shapes=[(1, 32)], weight_decay=0.0)
    args[0][0].zero_()
    for step in range(50):
        args[1][0].fill_(1e-5 if step < 3 else 1e-2)[0, 0] = 1.0
        before = args[0][0].clone()
        adam_step(*args)
        assert (args[0][0] - before).abs().max() <= 1e-3 * largest_update(step + 1, BETA1, BETA2) * 1.001


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30], ids=str)
def test_squares_of_extreme_gradients_neither_vanish_nor_overflow(scale):
    args = inputs(torch.float32, None, True, shapes=[(4, 64)], weight_decay=0.0)
    args[0][0].zero_()
    args[1][0].fill_(scale)
    args[11] = 0.0 if scale < 1 else 1e-8
    for step in range(1, 6):
        adam_step(*args)
        torch.testing.assert_close(args[0][0], torch.full((4, 64), -1e-3 * step), rtol=0.02, atol=0)


def test_saturated_fp32_second_moment_keeps_the_step_bounded():
    args = inputs(torch.float32, None, False, shapes=[(8,)], weight_decay=0.0)
    args[0][0].zero_()
    args[1][0].fill_(1e30)
    for _ in range(5):
        adam_step(*args)
    assert args[4][0].isfinite().all() and args[0][0].abs().max() <= 5e-3 * math.sqrt(5)


def test_bias_correction_follows_each_parameters_own_step():
    args = inputs(torch.float32, None, True, shapes=[(2, 32), (2, 32)], weight_decay=0.0)
    args[1][0].fill_(1.0), args[1][1].fill_(1.0)
    args[7][1].fill_(1000.0)
    before = [p.clone() for p in args[0]]
    adam_step(*args)
    first, later = ((b - p).mean().item() for b, p in zip(before, args[0], strict=True))
    assert first == pytest.approx(1e-3, rel=1e-4)
    expected = 1e-3 * 0.1 / math.sqrt(0.001 / (1 - BETA2**1001))
    assert later == pytest.approx(expected, rel=1e-3)


def test_learning_rate_and_step_changes_compile_once():
    args = inputs(torch.bfloat16, torch.int8, True, shapes=[(4, 64)])
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(adam_step, backend=backend, fullgraph=True)
    eager = run(adam_step, args)
    for lr in (1e-3, 5e-4, 2e-4):
        args[8] = torch.tensor(lr, dtype=torch.float64)
        compiled(*args)
        if lr == 1e-3:
            assert_same(args[:8], eager[:8])
    assert len(graphs) == 1
