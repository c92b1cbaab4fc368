"""Gradient release steps like the ordinary step, frees gradients, and refuses what it cannot do."""

import pytest
import torch
from torch import nn

from hf_flashoptim import FlashAdamW, enable_gradient_release
from tests.flashoptim.models import ALL, assert_bit_equal, small_model, tensors_of

EACH = pytest.mark.parametrize("cls, options", ALL.values(), ids=ALL.keys())


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(count)]


def backward(model, x):
    model(x.to(model[0].weight.dtype)).square().mean().backward()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_released_steps_equal_ordinary_ones_bit_for_bit_under_a_schedule(cls, options, dtype):
    results = []
    for release in (False, True):
        model = small_model(dtype)
        optimizer = cls(model.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
        handle = enable_gradient_release(model, optimizer) if release else None
        for x in batches(4):
            backward(model, x)
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if handle:
            handle.remove()
            assert not handle.active
        backward(model, batches(1)[0])
        optimizer.step()
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


def test_gradients_are_freed_one_by_one():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = FlashAdamW(model.parameters())
    alive = []
    enable_gradient_release(
        model, optimizer, pre_step=lambda p, group: alive.append(sum(q.grad is not None for q in model.parameters()))
    )
    model(torch.randn(2, 64)).sum().backward()
    assert len(alive) == 12 and max(alive) <= 2


def test_loading_a_state_dict_keeps_released_steps_going_with_the_new_groups():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2)
    enable_gradient_release(model, optimizer)
    backward(model, batches(1)[0])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = model[2].weight.detach().clone()
    backward(model, batches(1)[0])
    assert torch.equal(model[2].weight, before)


def test_parameters_outside_the_model_are_stepped_as_ever():
    model = small_model(torch.float32)
    extra = nn.Parameter(torch.ones(4))
    optimizer = FlashAdamW([*model.parameters(), extra])
    enable_gradient_release(model, optimizer)
    (model(batches(1)[0]).sum() + extra.sum()).backward()
    assert extra.grad is not None and extra.eq(1).all()
    optimizer.step()
    assert not extra.eq(1).any()


def test_pre_step_may_drop_a_gradient():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters())
    kept = model[2].weight
    enable_gradient_release(model, optimizer, pre_step=lambda p, group: p is not kept)
    before = kept.detach().clone()
    backward(model, batches(1)[0])
    assert torch.equal(kept, before) and kept.grad is None


def test_accumulating_is_noticed():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    backward(model, batches(1)[0])
    optimizer.step()
    backward(model, batches(1)[0])
    with pytest.raises(RuntimeError, match="cannot accumulate"):
        backward(model, batches(1)[0])


def test_a_parameter_used_twice_is_stepped_once():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert optimizer.state[layer.weight]["step"] == 3


def run_clipped(**options):
    """Norms of the gradients that reach the steps, by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = FlashAdamW(model.parameters(), lr=0.0)
    norms = []
    original = optimizer.step_param
    optimizer.step_param = lambda p, group: (norms[-1].append(p.grad.norm().item()), original(p, group))
    enable_gradient_release(model, optimizer, **options)
    for size in (1.0, 100.0, 0.01):
        norms.append([])
        model(size * torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return norms


def test_clipping_by_each_parameters_norm():
    free, clipped = run_clipped(), run_clipped(max_grad_norm=0.5, clip="parameter")
    for before, after in zip(free, clipped, strict=True):
        assert after == pytest.approx([min(norm, 0.5) for norm in before], rel=1e-4)


def test_clipping_by_the_norm_of_the_step_before():
    free, clipped = run_clipped(), run_clipped(max_grad_norm=0.5, clip="previous_step")
    assert clipped[0] == pytest.approx([min(norm, 0.5) for norm in free[0]], rel=1e-4)
    for step in (1, 2):
        global_norm = sum(norm**2 for norm in free[step - 1]) ** 0.5
        factor = min(1.0, 0.5 / global_norm)
        assert clipped[step] == pytest.approx([norm * factor for norm in free[step]], rel=1e-4)


@pytest.mark.parametrize("clip", ["parameter", "previous_step"])
def test_a_non_finite_gradient_does_not_reach_other_parameters_through_clipping(clip):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer, max_grad_norm=1.0, clip=clip)
    for bad in (True, False):
        loss = model(torch.randn(2, 8)).sum()
        hook = model[1].bias.register_hook(lambda g: g * float("nan")) if bad else None
        loss.backward()
        optimizer.step()
        if hook:
            hook.remove()
    assert model[1].weight.isfinite().all() and model[0].weight.isfinite().all()
    assert not model[1].bias.isfinite().any()


def test_what_cannot_work_is_refused():
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    with pytest.raises(NotImplementedError, match="GradScaler"):
        enable_gradient_release(model, optimizer, grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match="AdamW"):
        enable_gradient_release(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="clip='global'"):
        enable_gradient_release(model, optimizer, max_grad_norm=1.0, clip="global")
    with pytest.raises(ValueError, match="max_grad_norm=-1"):
        enable_gradient_release(model, optimizer, max_grad_norm=-1.0)
    handle = enable_gradient_release(model, optimizer)
    with pytest.raises(ValueError, match="already on"):
        enable_gradient_release(model, optimizer)
    handle.remove()
    enable_gradient_release(model, optimizer)
