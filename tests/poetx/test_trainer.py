"""POET-X in a plain Trainer, with nothing passed: the clock, the groups of its optimizer, the clipping after merges."""

import warnings

import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_poetx import PoetXCallback, PoetXConfig, attach_merging, create_poetx_optimizer, merge_step
from hf_poetx.optimizer import skew_learning_rate, trainable_skew
from hf_poetx.schedule import find_tuner
from hf_poetx.trainer import _refuse_what_loses_base_weights, clip_factor
from tests.poetx_training import (
    assert_same_state,
    layers_of,
    losses,
    make_trainer,
    merge_counts,
    tiny_llama,
    tiny_poetx,
)
from tests.versions import needs


def poetx_callbacks(trainer) -> list[PoetXCallback]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, PoetXCallback)]


class Recorder(TrainerCallback):
    """What a step ran under."""

    def __init__(self) -> None:
        self.clip: list[float] = []
        self.rates: list[list[float]] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.clip.append(args.max_grad_norm)
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def test_plain_trainer_merges_on_global_step(tmp_path):
    model = tiny_poetx(merge_interval=3, train_rest=True)
    trainer = make_trainer(model, tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    (callback,) = poetx_callbacks(trainer)
    assert list(callback.reports) == [3, 6] and merge_counts(model) == {2}
    assert losses(trainer)[8] < losses(trainer)[1] - 0.1


def test_interval_zero_never_merges(tmp_path):
    model = tiny_poetx(merge_interval=0)
    make_trainer(model, tmp_path, max_steps=3).train()
    assert merge_counts(model) == {0}


def test_models_without_adapter_train_as_before(tmp_path):
    trainer = make_trainer(tiny_llama(), tmp_path, max_steps=2)
    trainer.train()
    assert len(trainer.optimizer.param_groups) == 2 and not poetx_callbacks(trainer)[0].reports


def test_callback_passed_by_hand_as_well_merges_once(tmp_path):
    own = PoetXCallback()
    model = tiny_poetx(merge_interval=2)
    trainer = make_trainer(model, tmp_path, callbacks=[own], max_steps=5)
    trainer.train()
    assert list(own.reports) == [2, 4] and merge_counts(model) == {2}
    assert poetx_callbacks(trainer) == [own]


def test_merge_resets_optimizer_state_of_the_skew_entries_alone(tmp_path):
    model = tiny_poetx(merge_interval=2, train_rest=True)
    trainer = make_trainer(model, tmp_path, max_steps=4)
    trainer.train()
    skew = trainable_skew(model)
    steps = {parameter in skew: int(s["step"]) for parameter, s in trainer.optimizer.optimizer.state.items()}
    assert steps == {True: 0, False: 4}


def test_skipped_optimizer_steps_do_not_disturb_the_clock(tmp_path):
    """As a gradient scaler does, while `global_step` goes on."""
    model = tiny_poetx(merge_interval=2)
    trainer = make_trainer(model, tmp_path, max_steps=5)
    trainer.create_optimizer()
    inner, calls = trainer.optimizer.step, iter(range(5))
    trainer.optimizer.step = lambda *args: inner() if next(calls) >= 3 else None
    trainer.train()
    assert merge_counts(model) == {2}


def test_second_train_starts_its_clock_anew(tmp_path):
    model = tiny_poetx(merge_interval=3)
    trainer = make_trainer(model, tmp_path, max_steps=4)
    trainer.train()
    trainer.train()
    assert merge_counts(model) == {2} and list(poetx_callbacks(trainer)[0].reports) == [3]
    assert find_tuner(model).clock is None


class Crash(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError("crash")


@pytest.mark.parametrize("next_clock", ["Trainer", "merge_step", "attach_merging"])
def test_crash_in_training_leaves_clock_and_arguments_free(tmp_path, next_clock):
    model = tiny_poetx(merge_interval=3)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    crashed = make_trainer(model, tmp_path, callbacks=[Crash()], **best)
    with pytest.raises(RuntimeError, match="crash"):
        crashed.train()
    assert crashed.args.max_grad_norm == 1.0, "it crashed under a smaller one"
    assert find_tuner(model).clock is None
    assert not any(layer.save_base_weight for layer in layers_of(model))
    with pytest.raises(ValueError, match="absorbed periodic merges"), model.disable_adapter():
        pass
    if next_clock == "Trainer":
        make_trainer(model, tmp_path, max_steps=3).train()
        assert merge_counts(model) == {2}
    else:
        optimizer = create_poetx_optimizer(model, torch.optim.AdamW, 1e-3)
        (merge_step if next_clock == "merge_step" else attach_merging)(model, optimizer)


def test_second_clock_beside_the_trainer_is_refused(tmp_path):
    model = tiny_poetx()
    optimizer = create_poetx_optimizer(model, torch.optim.AdamW, 1e-2)
    handle = attach_merging(model, optimizer)
    trainer = make_trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=1)
    with pytest.raises(ValueError, match="attach_merging merges this model already; Trainer"):
        trainer.train()
    handle.remove()
    trainer.train()


@pytest.mark.parametrize("clock", [merge_step, attach_merging])
def test_second_clock_during_training_is_refused(tmp_path, clock):
    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            clock(model, optimizer)

    with pytest.raises(ValueError, match="Trainer merges this model already"):
        make_trainer(tiny_poetx(), tmp_path, callbacks=[Second()]).train()


def test_trainer_may_follow_a_hand_written_loop(tmp_path):
    model = tiny_poetx(merge_interval=2)
    merge_step(model, create_poetx_optimizer(model, torch.optim.AdamW, 1e-2))
    make_trainer(model, tmp_path, max_steps=2).train()
    assert merge_counts(model) == {1}


def test_second_adapter_is_refused_at_the_start(tmp_path):
    model = tiny_poetx()
    model.add_adapter("other", PoetXConfig(block=8))
    trainer = make_trainer(model, tmp_path)
    with pytest.raises(ValueError, match=r"'other'.*merge_interval=0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_reference_by_disabled_adapter_raises_at_the_first_step(tmp_path):
    class Reference(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            with model.disable_adapter():
                pass

    trainer = make_trainer(tiny_poetx(merge_interval=200), tmp_path, callbacks=[Reference()])
    with pytest.raises(ValueError, match="merge_interval=0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_disabled_adapter_is_the_reference_without_merges(tmp_path):
    class Reference(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            with model.disable_adapter():
                pass

    make_trainer(tiny_poetx(merge_interval=0), tmp_path, callbacks=[Reference()], max_steps=2).train()


def test_unknown_optimizer_is_an_error_at_the_start(tmp_path):
    class Unknown(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = tiny_poetx(merge_interval=200)
    trainer = make_trainer(model, tmp_path, optimizer_cls_and_kwargs=(Unknown, {"lr": 1e-2}))
    with pytest.raises(TypeError, match=r"Unknown.*merge_interval=0"):
        trainer.train()
    assert trainer.state.global_step == 0


def both_rates(lr: float, poet_scale: float = 0.5) -> set[float]:
    """Of the blocks of 8 and the last block of 4 in `tiny_poetx`."""
    return {skew_learning_rate(lr, block, poet_scale) for block in (8, 4)}


def skew_group_rates(trainer) -> set[float]:
    skew = trainable_skew(trainer.model)
    groups = [group for group in trainer.optimizer.param_groups if any(p in skew for p in group["params"])]
    assert all(p in skew for group in groups for p in group["params"]), "skew entries are alone in their groups"
    assert all(group["weight_decay"] == 0 for group in groups)
    return {group["lr"] for group in groups}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"])
def test_skew_entries_have_their_group_in_every_optimizer(tmp_path, optim):
    model = tiny_poetx(train_rest=True, poet_scale=0.25)
    trainer = make_trainer(model, tmp_path, optim=optim, weight_decay=0.1, max_steps=2, learning_rate=1e-3)
    trainer.create_optimizer()
    assert skew_group_rates(trainer) == both_rates(1e-3, 0.25)
    decayed = [p for g in trainer.optimizer.param_groups if g.get("weight_decay") for p in g["params"]]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    embedding = model.get_input_embeddings().weight
    assert any(p is embedding for p in decayed) and not any(p is n for p in decayed for n in norms)
    trainer.train()
    assert merge_counts(model) == {1}


def test_skew_entries_have_their_group_in_a_class_given_by_the_user(tmp_path):
    trainer = make_trainer(
        tiny_poetx(train_rest=True), tmp_path, optimizer_cls_and_kwargs=(torch.optim.NAdam, {"lr": 2e-3})
    )
    trainer.create_optimizer()
    assert skew_group_rates(trainer) == both_rates(2e-3)
    assert {len(group["params"]) > 0 for group in trainer.optimizer.param_groups} == {True}


def test_groups_that_an_optimizer_brings_are_kept(tmp_path, monkeypatch):
    """As GaLore's do: low-rank options for some parameters, and none for the rest."""
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS

    def handler(context):
        embedding = context.model.get_input_embeddings().weight
        rest = [p for p in context.model.parameters() if p is not embedding]
        groups = [{"params": rest}, {"params": [embedding], "rank": 4}]
        return torch.optim.AdamW, {**context.optimizer_kwargs, "params": groups}

    monkeypatch.setitem(_OPTIMIZER_HANDLERS, "sgd", handler)
    trainer = make_trainer(tiny_poetx(), tmp_path, optim="sgd", max_steps=2)
    trainer.train()
    assert skew_group_rates(trainer) == {0.0}, "the linear schedule has come to its end"
    assert [group.get("rank") for group in trainer.optimizer.param_groups] == [None, 4, None, None]


def test_factory_and_layerwise_optimizers_are_refused(tmp_path, monkeypatch):
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS

    class Factory:
        def __call__(self, model, **kwargs):
            return torch.optim.SGD(model.parameters(), lr=1e-2)

    for answer in [(Factory, {}), (torch.optim.SGD, {"optimizer_dict": {}}), (torch.optim.SGD, {"model": None})]:
        monkeypatch.setitem(_OPTIMIZER_HANDLERS, "sgd", lambda context, answer=answer: answer)
        with pytest.raises(ValueError, match=r"sgd.*makes its own parameter groups.*adamw_torch"):
            make_trainer(tiny_poetx(), tmp_path, optim="sgd").create_optimizer()
    monkeypatch.setitem(_OPTIMIZER_HANDLERS, "sgd", lambda context: (Factory, {}))
    make_trainer(tiny_llama(), tmp_path, optim="sgd").create_optimizer()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_schedule_scales_every_group_alike(tmp_path, schedule):
    recorder = Recorder()
    model = tiny_poetx(train_rest=True)
    make_trainer(model, tmp_path, callbacks=[recorder], lr_scheduler_type=schedule, warmup_steps=3).train()
    ratios = sorted(both_rates(1.0))
    moving = [rates for rates in recorder.rates if rates[0] > 0]
    assert len(moving) >= 6 and len({rates[0] for rates in moving}) >= 3
    for *rest, larger, smaller in moving:
        assert len(set(rest)) == 1
        assert [larger / rest[0], smaller / rest[0]] == pytest.approx(ratios, rel=1e-6)


def test_users_own_decaying_optimizer_is_warned_about(tmp_path):
    model = tiny_poetx(merge_interval=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    trainer = make_trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=1)
    with pytest.warns(UserWarning, match=r"weight_decay=0.1 .*create_poetx_optimizer"):
        trainer.train()


def test_users_own_optimizer_without_decay_is_taken_as_it_is(tmp_path):
    model = tiny_poetx()
    optimizer = create_poetx_optimizer(model, torch.optim.AdamW, 1e-3, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*weight_decay.*")
        make_trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=2).train()
    assert merge_counts(model) == {1}


def test_clip_factor_rises_after_each_merge_until_step_2000():
    interval, warmup = 100, 10
    factors = [clip_factor(step, interval, warmup) for step in range(2201)]
    assert set(factors[:100]) == {1.0}, "before the first merge"
    for merge in range(100, 2000, 100):
        assert factors[merge : merge + 10] == pytest.approx([0.1 + 0.09 * k for k in range(10)])
        assert set(factors[merge + 10 : merge + 100]) == {1.0}
    assert set(factors[2000:]) == {1.0}
    assert clip_factor(100, 100, 0) == 1.0


def test_clipping_is_tighter_after_a_merge_and_the_users_value_comes_back(tmp_path):
    recorder = Recorder()
    model = tiny_poetx(merge_interval=3, clip_warmup=2)
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(model, tmp_path, callbacks=[recorder], max_grad_norm=2.0, **saving)
    trainer.train()
    assert recorder.clip == pytest.approx([2.0, 2.0, 2.0, 0.2, 1.1, 2.0, 0.2, 1.1])
    assert trainer.args.max_grad_norm == 2.0
    saved = torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.max_grad_norm == 2.0


def test_clipping_that_is_off_stays_off(tmp_path):
    recorder = Recorder()
    make_trainer(tiny_poetx(), tmp_path, callbacks=[recorder], max_grad_norm=0.0, max_steps=4).train()
    assert recorder.clip == [0.0] * 4


def test_users_change_of_max_grad_norm_is_kept(tmp_path):
    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.max_grad_norm = 3.0

    recorder = Recorder()
    trainer = make_trainer(tiny_poetx(clip_warmup=0), tmp_path, callbacks=[Change(), recorder], max_steps=3)
    trainer.train()
    assert recorder.clip == [1.0, 3.0, 3.0] and trainer.args.max_grad_norm == 3.0


def test_out_of_memory_retry_starts_from_the_users_values(tmp_path):
    class OutOfMemory(TrainerCallback):
        failed = False

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("CUDA out of memory.")

    recorder = Recorder()
    model = tiny_poetx(merge_interval=3)
    trainer = make_trainer(
        model, tmp_path, callbacks=[OutOfMemory(), recorder], auto_find_batch_size=True, max_steps=4
    )
    trainer.train()
    assert recorder.clip[3] == 1.0, "the first step of the second attempt"
    assert trainer.args.max_grad_norm == 1.0 and list(poetx_callbacks(trainer)[0].reports) == [3]


REFUSED = {
    "FSDP1": ({"fsdp_version": 1, "reshard_after_forward": "full_shard"}, "FSDP version 1"),
    "FULL_STATE_DICT": ({"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}, "FULL_STATE_DICT.*SHARDED"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_sharding_that_loses_base_weights_is_refused_at_the_start(tmp_path, name, monkeypatch):
    plugin, message = REFUSED[name]
    trainer = make_trainer(tiny_poetx(), tmp_path)
    trainer.args.fsdp_plugin_args = plugin
    with pytest.raises(ValueError, match=message):
        trainer.train()
    never = make_trainer(tiny_poetx(merge_interval=0), tmp_path, max_steps=1)
    never.args.fsdp_plugin_args = plugin
    never.train()


@needs("accelerate", "1.11", "no plugin for FSDP is made without an accelerator")
@pytest.mark.filterwarnings("ignore")
def test_sharding_asked_for_by_arguments_is_seen(tmp_path):
    """The Trainer's default is a full state dict."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp="full_shard")
    with pytest.raises(ValueError, match=r"FULL_STATE_DICT|FSDP version 1"):
        _refuse_what_loses_base_weights(args)
    sharded = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp="full_shard", fsdp_config=sharded)
    _refuse_what_loses_base_weights(args)


@pytest.mark.filterwarnings("ignore")
def test_sharding_asked_for_by_accelerates_launcher_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="FSDP version 1"):
        _refuse_what_loses_base_weights(args)
    monkeypatch.setenv("FSDP_VERSION", "2")
    _refuse_what_loses_base_weights(args)
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    with pytest.raises(ValueError, match="FULL_STATE_DICT"):
        _refuse_what_loses_base_weights(args)


def test_deepspeed_is_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.deepspeed = "config.json"
    with pytest.raises(ValueError, match=r"DeepSpeed.*merge_interval=0"):
        _refuse_what_loses_base_weights(args)


@pytest.mark.filterwarnings("ignore")
def test_buffers_are_not_persistent_under_fsdp(tmp_path, monkeypatch):
    """accelerate's loading cannot distribute plain persistent buffers; adapters are saved from the modules anyway."""
    model = tiny_poetx()
    assert any("poetx_permutation" in name for name in model.state_dict())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    monkeypatch.setattr("hf_poetx.trainer._fsdp_plugin", lambda args: plugin)
    make_trainer(model, tmp_path)
    assert not any("poetx_permutation" in name for name in model.state_dict())
    model.save_pretrained(tmp_path / "adapter")
    fresh = tiny_poetx(merge_interval=2, seed=0)
    fresh.load_adapter(tmp_path / "adapter", "default")
    assert all(
        torch.equal(one.poetx_permutation_in["default"], other.poetx_permutation_in["default"])
        for one, other in zip(layers_of(model), layers_of(fresh), strict=True)
    )


def test_installing_twice_changes_nothing():
    from hf_poetx.trainer import install

    before = (transformers.Trainer.train, transformers.Trainer.create_optimizer, nn.Module.__call__)
    install()
    assert before == (transformers.Trainer.train, transformers.Trainer.create_optimizer, nn.Module.__call__)
    assert transformers.trainer.DEFAULT_CALLBACKS.count(PoetXCallback) == 1


def test_training_is_the_same_at_every_run(tmp_path):
    models = [tiny_poetx(merge_interval=3) for _ in range(2)]
    for model in models:
        make_trainer(model, tmp_path, max_steps=4).train()
    assert_same_state(*models)
