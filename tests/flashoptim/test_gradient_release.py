"""Gradient release steps like the ordinary step, frees gradients, and refuses what it cannot do."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_flashoptim import FlashAdamW, enable_gradient_release, gradient_release
from tests.flashoptim.models import ALL, assert_bit_equal, small_model, tensors_of

EACH = pytest.mark.parametrize("cls, options", ALL.values(), ids=ALL.keys())


def batches(count):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(count)]


def backward(model, x):
    model(x.to(model[0].weight.dtype)).square().mean().backward()


@pytest.fixture
def hold(monkeypatch):
    """Sets how many bytes of gradients wait."""
    return lambda nbytes: monkeypatch.setattr(gradient_release, "gradient_bytes_to_hold", lambda params: nbytes)


def count_calls(optimizer):
    """Number of parameters of every call of the optimizer, from now on."""
    calls = []
    step_params = optimizer.step_params
    optimizer.step_params = lambda params, group: (calls.append(len(params)), step_params(params, group))
    return calls


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("held", [0, 3000, 1 << 30], ids=["nothing_waits", "some_wait", "all_wait"])
def test_released_steps_equal_ordinary_ones_bit_for_bit_under_a_schedule(cls, options, dtype, held, hold):
    hold(held)
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


def test_gradients_wait_for_a_sixteenth_of_all_and_at_most_64_mib():
    small = [nn.Parameter(torch.zeros(8, 32, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(64))]
    assert gradient_release.gradient_bytes_to_hold(small) == (8 * 32 * 2 + 64 * 4) // 16
    large = [nn.Parameter(torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")) for _ in range(3)]
    assert gradient_release.gradient_bytes_to_hold(large) == 1 << 26


def test_as_many_gradients_wait_as_may_and_are_stepped_by_one_call():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)])
    optimizer = FlashAdamW(model.parameters())
    alive = []
    held = gradient_release.gradient_bytes_to_hold(list(model.parameters()))
    layer = sum(p.nbytes for p in model[0].parameters())
    assert 3 * layer < held < 4 * layer

    def measure(p, group):
        alive.append(sum(q.grad.nbytes for q in model.parameters() if q.grad is not None))
        return True

    enable_gradient_release(model, optimizer, pre_step=measure)
    calls = count_calls(optimizer)
    model(torch.randn(2, 64)).sum().backward()
    assert len(alive) == sum(calls) == 120
    assert 2 * layer < max(alive) < held + layer
    assert len(calls) <= 17


def test_what_still_waits_at_the_end_of_the_backward_pass_is_stepped_then(hold):
    hold(1 << 30)
    model = small_model()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    optimizer = FlashAdamW([{"params": matrices}, {"params": vectors}])
    enable_gradient_release(model, optimizer)
    calls = count_calls(optimizer)
    backward(model, batches(1)[0])
    assert sorted(calls) == [3, 5], "one call for every group"
    assert all(p.grad is None for p in model.parameters())
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


class Fails(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on the way back")


def fail_midway(model):
    """A backward pass that reaches the last layer only."""
    hidden = model[:-1](batches(1)[0].to(model[0].weight.dtype))
    with pytest.raises(ArithmeticError, match="on the way back"):
        model[-1](Fails.apply(hidden)).square().mean().backward()


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["nothing_waits", "all_wait"])
def test_a_backward_pass_that_raises_leaves_what_waited_to_the_next_step(held, hold):
    hold(held)
    results = []
    for release in (False, True):
        model = small_model()
        optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        if release:
            enable_gradient_release(model, optimizer)
        fail_midway(model)
        assert (model[-1].weight.grad is None) == (release and not held)
        optimizer.step()
        if release:
            assert model[-1].weight.grad is None
        optimizer.zero_grad()
        assert optimizer.state[model[-1].weight]["step"] == 1
        for x in batches(2):
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


def test_zero_grad_drops_what_a_backward_pass_that_raised_has_left(hold):
    hold(1 << 30)
    results = []
    for fails in (False, True):
        model = small_model()
        optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        enable_gradient_release(model, optimizer)
        if fails:
            fail_midway(model)
            optimizer.zero_grad()
        backward(model, batches(1)[0])
        optimizer.step()
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


def test_a_gradient_that_a_backward_pass_that_raised_has_left_is_not_added_to(hold):
    hold(1 << 30)
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    fail_midway(model)
    with pytest.raises(RuntimeError, match="cannot accumulate"):
        backward(model, batches(1)[0])


def test_removing_the_hooks_leaves_gradients_that_wait_to_the_ordinary_step(hold):
    hold(1 << 30)
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    handle = enable_gradient_release(model, optimizer)
    fail_midway(model)
    handle.remove()
    enable_gradient_release(model, optimizer)
    optimizer.step()
    assert optimizer.state[model[-1].weight]["step"] == 1


def test_reentrant_checkpoints_step_like_the_ordinary_step(hold):
    hold(1 << 30)
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        if release:
            enable_gradient_release(model, optimizer)
        for x in torch.randn(3, 2, 32):
            for index, layer in enumerate(model):
                x = layer(x) if index % 2 == 0 else checkpoint(layer, x, use_reentrant=True)
            x.square().sum().backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["nothing_waits", "all_wait"])
def test_a_second_gradient_from_a_nested_backward_pass_is_noticed(held, hold):
    hold(held)
    layer = nn.Linear(32, 32)
    optimizer = FlashAdamW(layer.parameters())
    enable_gradient_release(layer, optimizer)
    optimizer.step()
    x = torch.randn(2, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot accumulate"):
        layer(checkpoint(layer, x, use_reentrant=True)).sum().backward()


def test_a_hook_called_outside_of_any_backward_pass_steps_at_once(hold):
    hold(1 << 30)
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    p = model[2].weight
    p.grad = torch.ones_like(p)
    for hook in p._post_accumulate_grad_hooks.values():
        hook(p)
    assert p.grad is None and optimizer.state[p]["step"] == 1


def test_gradients_that_are_not_accumulated_are_not_released(hold):
    hold(1 << 30)
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    loss = model(batches(1)[0].to(torch.bfloat16)).sum()
    assert torch.autograd.grad(loss, model[2].weight)[0].any()
    assert not optimizer.state


def test_backward_passes_of_several_threads_step_what_is_theirs(hold):
    hold(1 << 30)
    models = [small_model(seed=seed) for seed in range(2)]
    both = nn.ModuleList(models)
    optimizer = FlashAdamW(both.parameters(), lr=1e-2)
    enable_gradient_release(both, optimizer)
    barrier = threading.Barrier(2)
    errors = []

    def run(model):
        # Both passes are under way before one ends.
        model[0].weight.register_hook(lambda grad: (barrier.wait(timeout=30), None)[1])
        try:
            backward(model, batches(1)[0])
            assert all(p.grad is None and optimizer.state[p]["step"] == 1 for p in model.parameters())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed, model in enumerate(models):
        alone = small_model(seed=seed)
        other = FlashAdamW(alone.parameters(), lr=1e-2)
        backward(alone, batches(1)[0])
        other.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_gradient_that_the_optimizer_refuses_makes_the_backward_pass_raise(hold):
    hold(1 << 30)
    model = nn.Sequential(nn.Embedding(9, 32, sparse=True), nn.Linear(32, 32))
    optimizer = FlashAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    before = model[1].weight.detach().clone()
    with pytest.raises(ValueError, match="sparse"):
        model(torch.arange(4)).sum().backward()
    assert torch.equal(model[1].weight, before), "a call that is refused steps nothing"


@pytest.mark.parametrize("compiled_backward", [False, True])
def test_compiled_training_steps_like_the_ordinary_step(compiled_backward):
    results = []
    for release in (False, True):
        torch._dynamo.reset()
        model = small_model(torch.float32)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        if release:
            enable_gradient_release(model, optimizer)
        train = torch.compile(lambda x, model=model: model(x).square().mean().backward(), backend="aot_eager")
        for x in batches(2):
            with torch._dynamo.config.patch(compiled_autograd=compiled_backward):
                train(x)
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


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
    step_params = optimizer.step_params

    def record_and_step(params, group):
        norms[-1].extend(p.grad.norm().item() for p in params)
        step_params(params, group)

    optimizer.step_params = record_and_step
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


def test_a_model_whose_parameters_the_optimizer_does_not_have_is_refused():
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    with pytest.raises(ValueError, match="No trainable parameter of this model belongs to the optimizer"):
        enable_gradient_release(copy.deepcopy(model), optimizer)


def test_removing_an_old_handle_again_leaves_the_new_one_on():
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    old = enable_gradient_release(model, optimizer)
    old.remove()
    new = enable_gradient_release(model, optimizer)
    old.remove()
    assert optimizer.gradient_release is new
