"""The one clock of merge-then-reinitialise, in hand-written loops."""

import copy
import warnings

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_poetx import (
    PoetXConfig,
    attach_merging,
    create_poetx_optimizer,
    get_poetx_model,
    merge_step,
    merge_then_reinitialize,
)
from hf_poetx.optimizer import trainable_skew
from hf_poetx.schedule import find_tuner
from tests.poetx_training import assert_same_state, batches, layers_of, merge_counts, tiny_llama, tiny_poetx


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return create_poetx_optimizer(model, torch.optim.AdamW, lr)


def train_step(model: nn.Module, optimizer, batch) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def randomize(model: nn.Module, q: float) -> None:
    for parameter in trainable_skew(model):
        nn.init.normal_(parameter, std=q)


def test_merge_keeps_the_function_up_to_the_reported_jump():
    model = tiny_poetx()
    randomize(model, 0.01)
    batch = batches(1)[0]
    before = model(**batch).logits
    report = merge_then_reinitialize(model)
    after = model(**batch).logits
    assert 0 < report.max_jump < 1e-4 and 0.01 < report.max_sigma < 0.2
    # About sigma^4 for each transform, and a rounding of 2^-24 a product.
    assert (after - before).norm() / before.norm() < 10 * report.max_jump + 1e-6
    assert all(not parameter.any() for parameter in trainable_skew(model)) and merge_counts(model) == {1}


def test_merge_is_the_same_whatever_precision_the_user_set():
    """Autocast, TF32 and reduced fp32 products must not reach the merge."""
    models = [tiny_poetx() for _ in range(2)]
    for model in models:
        torch.manual_seed(3)
        randomize(model, 0.02)
    reports = [merge_then_reinitialize(models[0])]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            reports.append(merge_then_reinitialize(models[1]))
        assert torch.get_float32_matmul_precision() == "medium", "the user's setting is restored"
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same_state(*models)
    assert reports[0].max_jump == reports[1].max_jump
    assert reports[0].max_sigma == pytest.approx(reports[1].max_sigma, rel=1e-5)


def test_permutations_neither_read_nor_change_the_global_random_state():
    first, second = tiny_poetx(), tiny_poetx()
    merge_then_reinitialize(first)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    merge_then_reinitialize(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(first, second)


def test_every_merge_draws_new_permutations():
    model = tiny_poetx()
    layer = layers_of(model)[0]
    seen = [layer.poetx_permutation_in["default"].clone()]
    for _ in range(2):
        merge_then_reinitialize(model)
        seen.append(layer.poetx_permutation_in["default"].clone())
    assert len({tuple(permutation.tolist()) for permutation in seen}) == 3


def test_large_rotation_is_warned_about_by_layer_name():
    model = tiny_poetx()
    name = layers_of(model)[3].canonical_name
    nn.init.normal_(layers_of(model)[3].poetx_skew_in["default"], std=0.3)
    with pytest.warns(UserWarning, match=rf"sigma\(Q\) above 0.5 in 1 layers.*{name}"):
        merge_then_reinitialize(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_block_is_reported_by_name_and_nothing_is_merged(value):
    model = tiny_poetx()
    optimizer = adamw(model)
    train_step(model, optimizer, batches(1)[0])
    layer = layers_of(model)[-1]
    layer.poetx_skew_out["default"].data[0, 0] = value
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"{layer.canonical_name}.*NaN or infinite"):
        merge_then_reinitialize(model, optimizer)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    for index, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in entry.items())


def test_merge_resets_the_state_of_exactly_the_skew_entries():
    model = tiny_poetx(train_rest=True)
    optimizer = adamw(model)
    train_step(model, optimizer, batches(1)[0])
    merge_then_reinitialize(model, optimizer)
    skew = trainable_skew(model)
    for parameter, state in optimizer.state.items():
        assert bool(state["step"]) == bool(state["exp_avg"].any()) == (parameter not in skew)


def test_merge_of_a_merged_adapter_is_refused():
    model = tiny_poetx()
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        merge_then_reinitialize(model)


def test_merge_step_and_attach_merging_train_alike():
    models = [tiny_poetx(merge_interval=3) for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    attach_merging(models[1], optimizers[1])
    merged = []
    for number, batch in enumerate(batches(7), start=1):
        train_step(models[0], optimizers[0], batch)
        if merge_step(models[0], optimizers[0]):
            merged.append(number)
        train_step(models[1], optimizers[1], batch)
        assert_same_state(*models)
    assert merged == [3, 6] and merge_counts(models[0]) == {2}


@pytest.mark.parametrize("clock", ["merge_step", "attach_merging"])
def test_counter_of_a_loop_comes_back_with_the_adapter(tmp_path, clock):
    """Two steps, save, load into a new model, one more step: the third step merges, as without a break."""

    def loop(model, optimizer, rows):
        handle = attach_merging(model, optimizer) if clock == "attach_merging" else None
        for batch in rows:
            train_step(model, optimizer, batch)
            if handle is None:
                merge_step(model, optimizer)

    through, broken = tiny_poetx(merge_interval=3), tiny_poetx(merge_interval=3)
    optimizer = adamw(through)
    loop(through, optimizer, batches(4))

    optimizer = adamw(broken)
    loop(broken, optimizer, batches(4)[:2])
    broken.save_pretrained(tmp_path)
    resumed = tiny_poetx(merge_interval=3)
    resumed.load_adapter(tmp_path, "default", is_trainable=True)
    new_optimizer = adamw(resumed)
    new_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop(resumed, new_optimizer, batches(4)[2:])
    assert merge_counts(resumed) == {1}
    assert_same_state(through, resumed)


@pytest.mark.parametrize("clock", ["merge_step", "attach_merging"])
def test_accelerate_loop_counts_optimizer_steps_not_batches(clock):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_poetx(merge_interval=2)
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if clock == "attach_merging":
        attach_merging(model, optimizer)
    for batch in batches(8, size=2):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            if clock == "merge_step":
                merge_step(model, optimizer)
            optimizer.zero_grad()
    assert int(find_tuner(model).poetx_step["default"]) == 4 and merge_counts(model) == {2}


def test_accelerate_state_holds_merged_weights_and_counter(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = tiny_poetx(merge_interval=2), tiny_poetx(merge_interval=2)
    model, optimizer = accelerator.prepare(first, adamw(first))
    for batch in batches(3):
        train_step(model, optimizer, batch)
        merge_step(model, optimizer)
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    model, _ = accelerator.prepare(second, adamw(second))
    accelerator.load_state(tmp_path)
    assert merge_counts(second) == {1}
    assert_same_state(first, second)


def test_steps_that_a_gradient_scaler_skips_do_not_count():
    model = tiny_poetx(merge_interval=2)
    optimizer = adamw(model)
    attach_merging(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = []
    for number, batch in enumerate(batches(4)):
        scaler.scale(model(**batch).loss).backward()
        if number == 1:
            next(iter(trainable_skew(model))).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts.append(int(find_tuner(model).poetx_step["default"]))
    assert counts == [1, 1, 2, 3] and merge_counts(model) == {1}


def test_merge_before_any_state_exists_is_harmless():
    """A scaler may skip all steps up to the merge."""
    model = tiny_poetx(merge_interval=1)
    optimizer = adamw(model)
    merge_step(model, optimizer)
    assert not optimizer.state and merge_counts(model) == {1}


def test_filling_optimizer_state_for_a_distributed_checkpoint_is_no_step():
    """torch steps once with a rate of zero and gradients of zero when asked for the state of a fresh optimizer."""
    model = tiny_poetx(merge_interval=1)
    optimizer = adamw(model)
    attach_merging(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert merge_counts(model) == {0} and int(find_tuner(model).poetx_step["default"]) == 0


def test_warm_up_step_with_a_rate_of_zero_counts():
    model = tiny_poetx(merge_interval=1)
    optimizer = adamw(model, lr=0.0)
    attach_merging(model, optimizer)
    train_step(model, optimizer, batches(1)[0])
    assert merge_counts(model) == {1}


def test_distributed_optimizer_state_round_trips_after_a_merge():
    model = tiny_poetx(merge_interval=2)
    optimizer = adamw(model)
    attach_merging(model, optimizer)
    for batch in batches(2):
        train_step(model, optimizer, batch)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin = tiny_poetx(merge_interval=2)
    twin.load_state_dict(model.state_dict())
    twin_optimizer = adamw(twin)
    attach_merging(twin, twin_optimizer)
    set_optimizer_state_dict(twin, twin_optimizer, saved)
    for batch in batches(5)[2:]:
        train_step(model, optimizer, batch)
        train_step(twin, twin_optimizer, batch)
    assert_same_state(model, twin)


@pytest.mark.parametrize("second", ["attach_merging", "merge_step"])
def test_second_clock_is_refused(second):
    model = tiny_poetx()
    optimizer = adamw(model)
    attach_merging(model, optimizer)
    clock = {"attach_merging": attach_merging, "merge_step": merge_step}[second]
    with pytest.raises(ValueError, match=f"attach_merging merges this model already; {second}"):
        clock(model, optimizer)


def test_removed_handle_leaves_the_model_to_another_clock():
    model = tiny_poetx(merge_interval=1)
    optimizer = adamw(model)
    handle = attach_merging(model, optimizer)
    handle.remove()
    handle.remove()
    train_step(model, optimizer, batches(1)[0])
    assert merge_counts(model) == {0}
    assert merge_step(model, optimizer) is not None


@pytest.mark.parametrize("how", ["plain", "fused", "compiled", "copied"])
def test_loop_that_forgets_is_told_once(how):
    model = tiny_poetx(merge_interval=2)
    if how == "copied":
        model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=how == "fused")
    if how == "compiled":
        model = torch.compile(model, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(6):
            train_step(model, optimizer, batch)
    told = [str(w.message) for w in caught if "merge_interval=2" in str(w.message)]
    assert len(told) == 1 and "merge_step(model, optimizer)" in told[0]


@pytest.mark.parametrize("how", ["merge_step", "attach_merging", "merge_interval=0"])
def test_loop_that_merges_or_wants_none_is_not_told(how):
    model = tiny_poetx(merge_interval=0 if how == "merge_interval=0" else 2)
    optimizer = adamw(model)
    if how == "attach_merging":
        attach_merging(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a merge.*")
        for batch in batches(5):
            train_step(model, optimizer, batch)
            if how == "merge_step":
                merge_step(model, optimizer)


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
def test_due_interval_with_a_second_adapter_is_refused(clock):
    model = tiny_poetx()
    model.add_adapter("other", PoetXConfig(block=8))
    with pytest.raises(ValueError, match=r"'other'.*merge_interval=0"):
        clock(model, adamw(model))


def test_second_adapter_trains_without_merges():
    model = tiny_poetx(merge_interval=0)
    model.add_adapter("other", PoetXConfig(block=8, merge_interval=0, target_modules=["q_proj"]))
    model.set_adapter("other")
    optimizer = adamw(model)
    for batch in batches(2):
        train_step(model, optimizer, batch)
        assert merge_step(model, optimizer) is None
    assert all(not layer.poetx_skew_in["default"].any() for layer in layers_of(model))
    trained = [layer for layer in layers_of(model) if "other" in layer.poetx_config]
    assert trained and all(layer.poetx_skew_in["other"].any() for layer in trained)


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
def test_reference_by_disabled_adapter_is_refused_at_once(clock):
    model = tiny_poetx()
    clock(model, adamw(model))
    with pytest.raises(ValueError, match="merge_interval=0"):
        with model.disable_adapter():
            pass


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
def test_reference_after_a_loop_is_the_original_or_refused(clock):
    """Nothing says that a loop has ended but evaluation mode; what decides then is whether the base is still there."""
    original = tiny_llama().eval()(**batches(1)[0]).logits
    model = tiny_poetx(merge_interval=2)
    optimizer = adamw(model)
    train_step(model, optimizer, batches(1)[0])
    clock(model, optimizer)
    with pytest.raises(ValueError, match=r"if training is over, call model.eval\(\)"), model.disable_adapter():
        pass
    model.eval()
    with model.disable_adapter():
        assert torch.equal(model(**batches(1)[0]).logits, original)
    model.train()
    for batch in batches(2):
        train_step(model, optimizer, batch)
        if clock is merge_step:
            merge_step(model, optimizer)
    assert merge_counts(model) == {1}
    model.eval()
    with pytest.raises(ValueError, match=r"absorbed periodic merges.*load the base model apart"):
        with model.disable_adapter():
            pass
    # The refusal has left the adapter on.
    assert not torch.equal(model(**batches(1)[0]).logits, original)


def test_a_loaded_adapter_that_has_merged_cannot_be_disabled(tmp_path):
    model = tiny_poetx()
    merge_then_reinitialize(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match="absorbed periodic merges"), loaded.disable_adapter():
        pass


class UnknownOptimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
def test_unknown_optimizer_is_an_error_at_the_first_step(clock):
    model = tiny_poetx(merge_interval=200)
    with pytest.raises(TypeError, match="UnknownOptimizer"):
        clock(model, UnknownOptimizer(model.parameters()))


def test_unknown_optimizer_trains_without_merges():
    model = tiny_poetx(merge_interval=0)
    assert merge_step(model, UnknownOptimizer(model.parameters())) is None


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
@pytest.mark.parametrize("kind", ["FSDP1", "DeepSpeed"])
def test_wrapper_that_flattens_parameters_is_refused(clock, kind, monkeypatch):
    class Wrapper(nn.Module):
        """Stands for FSDP1, which has no CPU version, and for DeepSpeed's engine."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    if kind == "FSDP1":
        monkeypatch.setattr("hf_poetx.schedule.FullyShardedDataParallel", Wrapper)
    else:
        monkeypatch.setattr(Wrapper, "__module__", "deepspeed.runtime.engine")
    model = Wrapper(tiny_poetx())
    with pytest.raises(ValueError, match=r"Wrapper flattens.*fully_shard"):
        clock(model, adamw(model))
    assert find_tuner(model).clock is None
    never = Wrapper(tiny_poetx(merge_interval=0))
    clock(never, adamw(never))


def test_model_without_adapter_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no POET-X adapter.*get_poetx_model"):
        merge_step(nn.Linear(2, 2), None)


def test_plain_module_merges_too():
    model = get_poetx_model(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), PoetXConfig(block=4, merge_interval=1))
    optimizer = adamw(model)
    model(torch.randn(3, 12)).square().sum().backward()
    optimizer.step()
    assert len(merge_step(model, optimizer).layers) == 2
