"""FlashOptim inside a plain transformers Trainer."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from hf_flashoptim import FlashAdamW, FlashMonitorCallback, FlashOptimizer, cast_model, register_optimizers
from hf_flashoptim.gradient_release import unwrap
from hf_flashoptim.trainer import OPTIMIZERS, read_optim_args
from tests.flashoptim.llama import arguments, losses, make_trainer, rates, single_thread, tiny_llama  # noqa: F401
from tests.flashoptim.models import assert_bit_equal

EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def optimizer_of(trainer) -> FlashOptimizer:
    return unwrap(trainer.optimizer)


def final_state(trainer) -> dict[str, torch.Tensor]:
    optimizer = optimizer_of(trainer)
    tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for name, p in trainer.model.named_parameters():
        tensors.update({f"{name}/{key}": value.clone() for key, value in optimizer.state[p].items()})
    return tensors


@EACH
def test_each_optimizer_trains_by_its_name(name, tmp_path):
    rate = {"flash_lion": 1e-3, "flash_sgd": 0.5, "flash_sgdw": 0.5}.get(name, 1e-2)
    momentum = "momentum=0.9" if "sgd" in name else None
    trainer = make_trainer(tmp_path, optim=name, learning_rate=rate, optim_args=momentum, max_steps=12)
    trainer.train()
    assert type(optimizer_of(trainer)) is OPTIMIZERS[name]
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3


@EACH
def test_names_go_through_arguments_json_yaml_and_the_command_line(name, tmp_path):
    args = arguments(tmp_path, optim=name)
    assert args.optim is OptimizerNames(name) and args.optim in list(OptimizerNames)
    assert json.loads(args.to_json_string())["optim"] == name
    assert args.to_sanitized_dict()["optim"] == name
    parser = HfArgumentParser(TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--optim", name, "--optim_args", "master_weight_bits=32"]
    )
    assert parsed.optim == name
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "optim": name, "optim_args": "quantize=false"}))
    (from_yaml,) = parser.parse_yaml_file(path)
    assert from_yaml.optim == name and from_yaml.optim_args == "quantize=false"
    assert parser.parse_dict({"output_dir": str(tmp_path), "optim": name})[0].optim == name
    assert args.set_optimizer(name=name, learning_rate=1e-3).optim == name
    assert pickle.loads(pickle.dumps(args)).optim is args.optim


def test_a_fresh_process_reads_saved_arguments_without_importing_anything(tmp_path):
    torch.save(arguments(tmp_path), tmp_path / "training_args.bin")
    path = str(tmp_path / "training_args.bin")
    code = f"import torch; print(repr(torch.load({path!r}, weights_only=False).optim))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and "FLASH_ADAMW" in result.stdout, result.stderr


def test_registering_again_changes_nothing():
    import transformers.trainer

    before = list(OptimizerNames), list(transformers.trainer.DEFAULT_CALLBACKS)
    register_optimizers()
    assert (list(OptimizerNames), list(transformers.trainer.DEFAULT_CALLBACKS)) == before


def test_groups_decay_as_trainer_makes_them_and_start_their_schedules(tmp_path):
    trainer = make_trainer(tmp_path, weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6)
    trainer.train()
    decayed, plain = optimizer_of(trainer).param_groups
    names = {p: name for name, p in trainer.model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all("norm" in names[p] for p in plain["params"])
    assert not any("norm" in names[p] for p in decayed["params"])
    assert decayed["betas"] == (0.9, 0.95) and decayed["eps"] == 1e-6 and decayed["reference_lr"] == 1e-2


def test_optim_args_reach_every_keyword_with_its_type(tmp_path):
    text = "master_weight_bits=32, quantize=False, compress_state_dict=no, check_numerics=0, fused=false, "
    text += "decouple_lr=true, beta1=0.8, eps=1e-7, maximize=false"
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16, optim_args=text)
    optimizer = trainer.create_optimizer()
    group = optimizer.param_groups[0]
    assert group["master_weight_bits"] == 32 and group["quantize"] is False and group["decouple_lr"] is True
    assert group["betas"] == (0.8, 0.999) and group["eps"] == 1e-7 and group["maximize"] is False
    assert (optimizer._compress_state_dict, optimizer._fused) == (False, False)
    assert read_optim_args("flash_adamw", "master_weight_bits=none")[0] == {"master_weight_bits": None}
    sgd = make_trainer(tmp_path, optim="flash_sgd", optim_args="momentum=0.9,nesterov=1").create_optimizer()
    assert sgd.param_groups[0]["momentum"] == 0.9 and sgd.param_groups[0]["nesterov"] is True


def test_lion_has_its_own_betas_unless_they_are_set(tmp_path):
    lion = make_trainer(tmp_path, optim="flash_lion").create_optimizer()
    assert lion.param_groups[0]["betas"] == (0.9, 0.99)
    lion = make_trainer(tmp_path, optim="flash_lion", adam_beta1=0.95, adam_beta2=0.98).create_optimizer()
    assert lion.param_groups[0]["betas"] == (0.95, 0.98)


@pytest.mark.parametrize(
    "text, named",
    [
        ("master_bits=32", "Valid keys: .*exempt.*master_weight_bits"),
        ("lr=1", "learning_rate"),
        ("weight_decay=1", "TrainingArguments.weight_decay"),
        ("quantize=maybe", "true or false"),
        ("eps=small", "a number"),
        ("release_clip=global", "release_clip='global'"),
        ("exempt=nothing", "matches no parameter"),
        ("master_weight_bits=32", "has no effect"),
    ],
)
def test_optim_args_that_are_wrong_say_what_is_right(text, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path, optim_args=text).create_optimizer()


def test_optim_args_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="key=value"):
        read_optim_args("flash_adamw", "quantize")


def test_layers_are_kept_out_of_compression_by_name(tmp_path):
    text = "exempt=lm_head|*.embed_tokens|model.layers.1.mlp.*"
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16, optim_args=text, weight_decay=0.1)
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert isinstance(optimizer, FlashAdamW)
    for name, p in trainer.model.named_parameters():
        exempt = name.startswith(("lm_head", "model.embed_tokens", "model.layers.1.mlp."))
        state = optimizer.state[p]
        assert ("exp_avg" in state) == (exempt or p.ndim < 2), name
        assert state["error_bits"].dtype == (torch.int16 if exempt else torch.int8)
        group = optimizer.group_of(p)
        assert group["weight_decay"] == (0.0 if "norm" in name else 0.1)


def test_bf16_true_with_fp32_weights_compresses_moments_only(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True)
    trainer.train()
    for p in trainer.model.parameters():
        assert p.dtype == torch.float32 and "error_bits" not in optimizer_of(trainer).state[p]


def test_weights_in_bf16_take_5_bytes(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16)
    trainer.train()
    p = trainer.model.lm_head.weight
    state = optimizer_of(trainer).state[p]
    assert p.nbytes + sum(t.nbytes for t in state.values()) == p.numel() * 5 + 4 * p.numel() // 32 + 4


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("flash_adamw", torch.float32),
        ("flash_adamw", torch.bfloat16),
        ("flash_lion", torch.bfloat16),
        ("flash_sgd", torch.bfloat16),
    ],
    ids=str,
)
def test_resuming_a_trainer_is_bitwise_equal(name, dtype, tmp_path):
    options = {"optim": name, "optim_args": "momentum=0.9" if name == "flash_sgd" else None}
    through = make_trainer(tmp_path / "through", dtype=dtype, **options)
    through.train()
    first = make_trainer(tmp_path / "run", dtype=dtype, save_strategy="steps", save_steps=3, **options)

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    first.add_callback(Stop())
    first.train()
    resumed = make_trainer(tmp_path / "run", dtype=dtype, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(resumed)[-3:] == losses(through)[-3:]
    assert_bit_equal(final_state(resumed), final_state(through))


def test_hyperparameter_search_makes_an_optimizer_for_each_trial(tmp_path):
    tried = []

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, optimizer=None, **kwargs):
            tried.append((args.optim, args.learning_rate, unwrap(optimizer)))

    grid = {"optim": ["flash_adamw", "flash_lion"], "learning_rate": [1e-6, 1e-3]}
    trainer = make_trainer(tmp_path, model_init=lambda: tiny_llama(), callbacks=[Watch()])
    trainer.eval_dataset = trainer.train_dataset
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values) for name, values in grid.items()},
        backend="optuna",
        n_trials=4,
        sampler=optuna.samplers.GridSampler(grid),
    )
    assert len({id(optimizer) for *_, optimizer in tried}) == 4
    assert {(name, rate): type(optimizer) for name, rate, optimizer in tried} == {
        (name, rate): OPTIMIZERS[name] for name in grid["optim"] for rate in grid["learning_rate"]
    }
    assert best.hyperparameters["learning_rate"] == 1e-3


def release(folder: Path, text: str = "gradient_release=True", **options):
    return make_trainer(folder, optim_args=text, **{"max_grad_norm": 0.0, **options})


@pytest.mark.parametrize(
    "name, dtype", [("flash_adamw", torch.float32), *((name, torch.bfloat16) for name in OPTIMIZERS)], ids=str
)
def test_gradient_release_equals_the_ordinary_trainer_bit_for_bit(name, dtype, tmp_path):
    ordinary = make_trainer(tmp_path, optim=name, dtype=dtype, max_grad_norm=0.0)
    released = release(tmp_path, optim=name, dtype=dtype)
    ordinary.train()
    released.train()
    assert losses(released) == losses(ordinary)
    assert rates(released) == rates(ordinary) and len(set(rates(released))) > 4, "the schedule is followed"
    assert_bit_equal(final_state(released), final_state(ordinary))
    assert optimizer_of(released).gradient_release is None, "off again after the training"


def test_gradient_release_resumes_bit_for_bit(tmp_path):
    through = release(tmp_path / "through")
    through.train()
    release(tmp_path / "run", save_strategy="steps", save_steps=3).train()
    resumed = release(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_bit_equal(final_state(resumed), final_state(through))


@pytest.mark.parametrize("clip", ["parameter", "previous_step"])
def test_gradient_release_with_clipping_that_works_trains(clip, tmp_path):
    trainer = release(tmp_path, f"gradient_release=1,release_max_grad_norm=0.5,release_clip={clip}", max_steps=12)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3


@pytest.mark.parametrize(
    "options, named",
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0.*release_max_grad_norm"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
    ids=["accumulation", "clipping", "batch_size"],
)
def test_gradient_release_refuses_at_the_start_and_says_the_fix(options, named, tmp_path):
    trainer = release(tmp_path, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match=named):
        trainer.train()
    assert_bit_equal({name: p.detach() for name, p in trainer.model.named_parameters()}, before)


@pytest.mark.parametrize("setting, value", [("fp16", True), ("deepspeed", {"zero_optimization": {}})])
def test_gradient_release_refuses_settings_that_need_other_hardware(setting, value, tmp_path):
    from hf_flashoptim.trainer import refuse_what_needs_all_gradients

    args = arguments(tmp_path, max_grad_norm=0.0)
    setattr(args, setting, value)
    with pytest.raises(ValueError, match=setting):
        refuse_what_needs_all_gradients(args, tiny_llama())


@pytest.mark.filterwarnings("ignore:.*sensitive")
def test_monitoring_logs_cost_and_names_sensitive_layers(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16, logging_steps=2)
    trainer.add_callback(FlashMonitorCallback(nmse_threshold=1e-6))
    with pytest.warns(UserWarning, match="exempt=model.embed_tokens.weight"):
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3
    for entry in logged:
        assert entry["flash_step_ms"] > 0 and entry["flash_peak_memory_gib"] > 0
        assert 0 < entry["flash_nmse_exp_avg"] < 0.01 and 0 < entry["flash_nmse_exp_avg_sq"] < 0.01
        assert 0 <= entry["flash_lost_updates"] < 0.1


@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
def test_monitoring_warns_of_updates_that_round_to_nothing(tmp_path):
    trainer = make_trainer(
        tmp_path, dtype=torch.bfloat16, optim_args="master_weight_bits=none", learning_rate=1e-7, max_steps=3
    )
    trainer.add_callback(FlashMonitorCallback())
    with pytest.warns(UserWarning, match="round to nothing.*master_weight_bits=32"):
        trainer.train()


def test_monitoring_with_gradient_release_says_what_it_cannot_measure(tmp_path):
    trainer = release(tmp_path)
    trainer.add_callback(FlashMonitorCallback())
    with pytest.warns(UserWarning, match="not measured"):
        trainer.train()
    assert "flash_step_ms" in trainer.state.log_history[0]


def test_monitoring_changes_no_bit(tmp_path):
    plain, watched = make_trainer(tmp_path), make_trainer(tmp_path)
    watched.add_callback(FlashMonitorCallback())
    plain.train()
    watched.train()
    assert_bit_equal(final_state(plain), final_state(watched))


def test_sensitive_layers_kept_in_fp32_by_cast_model_train(tmp_path):
    model = tiny_llama()
    cast_model(model, full_precision_layers=["lm_head"])
    trainer = make_trainer(tmp_path, model=model)
    trainer.train()
    assert "error_bits" not in optimizer_of(trainer).state[model.lm_head.weight]
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_monitoring_measures_once_an_epoch_where_that_is_how_logs_are_written(tmp_path):
    trainer = make_trainer(tmp_path, logging_strategy="epoch", max_steps=-1, num_train_epochs=3)
    trainer.add_callback(FlashMonitorCallback())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3 and all(entry["flash_nmse_exp_avg"] < 0.01 for entry in logged)
    assert all(entry["flash_lost_updates"] < 0.1 for entry in logged)


def test_a_name_set_after_construction_trains(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.args.optim = "flash_adamw"
    trainer.train()
    assert type(optimizer_of(trainer)) is FlashAdamW


def test_an_optimizer_with_exempt_layers_copies_and_pickles(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.bfloat16, optim_args="exempt=*lm_head*", max_steps=2)
    trainer.train()
    optimizer = pickle.loads(pickle.dumps(optimizer_of(trainer)))
    assert type(optimizer) is FlashAdamW
    for group, own in zip(optimizer.param_groups, optimizer_of(trainer).param_groups, strict=True):
        assert group["quantize"] == own["quantize"] and group["master_weight_bits"] == own["master_weight_bits"]


def test_a_pattern_that_matches_nothing_or_nothing_trained_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"'\*.lm_head.\*' matches no parameter.*'lm_head.weight'"):
        make_trainer(tmp_path, optim_args="exempt=*.lm_head.*").train()
    model = tiny_llama()
    model.lm_head.requires_grad_(False)
    with pytest.warns(UserWarning, match="exempt='lm_head' matches frozen parameters only"):
        make_trainer(tmp_path, model=model, optim_args="exempt=lm_head", max_steps=1).train()


def test_clipping_of_released_gradients_without_release_is_refused():
    with pytest.raises(ValueError, match="release_max_grad_norm clips with gradient_release=true only"):
        read_optim_args("flash_adamw", "release_max_grad_norm=1.0")
