"""Checkpoint and resume through the plain Trainer: what was stopped, or killed, goes on as if it had not been."""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hf_flashoptim  # noqa: F401  registers flash_adamw
from tests.poetx_training import (
    assert_same_state,
    layers_of,
    losses,
    make_trainer,
    merge_counts,
    tiny_llama,
    tiny_poetx,
)

ROOT = Path(__file__).parents[2]
INTERVAL, STEPS = 3, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def scratch(dtype: torch.dtype) -> nn.Module:
    """From a configuration, everything trained, as in pretraining; dropout, so that random states matter."""
    model = tiny_poetx(dtype, merge_interval=INTERVAL, train_rest=True, init="normalize")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


def with_base_on_disk(dtype: torch.dtype, folder: Path) -> nn.Module:
    from hf_poetx import PoetXConfig, get_poetx_model

    if not folder.exists():
        tiny_llama(dtype).save_pretrained(folder)
    base = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return get_poetx_model(base, PoetXConfig(block=8, merge_interval=INTERVAL, target_modules=["q_proj", "down_proj"]))


RUNS = ("scratch-fp32-adamw_torch", "scratch-bf16-flash_adamw", "disk-fp32-flash_adamw", "disk-bf16-adamw_torch")


@pytest.fixture(scope="module", params=RUNS)
def whole_run(request, tmp_path_factory):
    """A run that was not stopped, with a checkpoint at every step: its Trainer, a maker of its model, its folder."""
    kind, dtype, optim = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)

    def make() -> nn.Module:
        return scratch(DTYPES[dtype]) if kind == "scratch" else with_base_on_disk(DTYPES[dtype], folder / "base")

    torch.manual_seed(0)
    trainer = make_trainer(make(), folder, optim=optim, save_strategy="steps", save_steps=1, max_steps=STEPS)
    trainer.train()
    assert merge_counts(trainer.model) == {2}
    return trainer, make, optim, folder


# Before the first merge, at one, after one in the middle of an epoch, at the end of the epoch of 4 steps, at the last.
@pytest.mark.parametrize("step", [2, 3, 5, 4, 6])
def test_resume_is_bitwise_equal(whole_run, tmp_path, step):
    whole, make, optim, folder = whole_run
    torch.manual_seed(step)
    resumed = make_trainer(make(), tmp_path, optim=optim, max_steps=STEPS)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    expected = {number: loss for number, loss in losses(whole).items() if number > step}
    assert {number: loss for number, loss in losses(resumed).items() if number > step} == expected
    assert len(expected) == STEPS - step
    assert_same_state(whole.model, resumed.model)


def test_checkpoints_hold_base_weights_from_the_first_merge_on(whole_run):
    """Or from the start, where no base model is on disk."""
    whole, _, _, folder = whole_run
    before, after = ((folder / f"checkpoint-{step}" / "adapter_model.safetensors").stat().st_size for step in (2, 3))
    weights = sum(layer.get_base_layer().weight.nbytes for layer in layers_of(whole.model))
    assert (after - before > 0.9 * weights) == ("base" in os.listdir(folder))


def test_second_train_resumes_in_the_same_process(tmp_path):
    model = scratch(torch.float32)
    trainer = make_trainer(model, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    whole, logged = copy.deepcopy(model), losses(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_state(whole, model)
    assert losses(trainer) == logged


@pytest.mark.parametrize("change", [{"block": 4}, {"seed": 7}, {"permutation_group": 2}])
def test_resume_with_other_settings_names_the_fix(tmp_path, change):
    make_trainer(tiny_poetx(), tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    trainer = make_trainer(tiny_poetx(**change), tmp_path)
    (name, value), saved = next(iter(change.items())), {"block": 8, "seed": 0, "permutation_group": 1}
    message = rf"trained with {name}={saved[name]}, this model has {name}={value}.*{name}={saved[name]}"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)


class Snapshots(TrainerCallback):
    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.states[state.global_step] = copy.deepcopy(model.state_dict())


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


@pytest.mark.parametrize("best", [2, 3, 5])
@pytest.mark.parametrize("kind", ["scratch", "disk"])
def test_best_model_comes_back_also_from_before_the_first_merge(tmp_path, best, kind):
    def make() -> nn.Module:
        return scratch(torch.float32) if kind == "scratch" else with_base_on_disk(torch.float32, tmp_path / "base")

    snapshots = Snapshots()
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    saving |= {"load_best_model_at_end": True, "save_total_limit": 2}
    trainer = make_trainer(make(), tmp_path / "out", callbacks=[snapshots], max_steps=6, **saving)
    real = trainer.evaluate

    def evaluate(*args, **kwargs) -> dict[str, float]:
        return real(*args, **kwargs) | {"eval_loss": abs(trainer.state.global_step - best)}

    trainer.evaluate = evaluate
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    expected = snapshots.states[best]
    different = [
        name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, expected[name])
    ]
    assert not different
    checkpoints = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert f"checkpoint-{best}" in checkpoints and len(checkpoints) == 2

    trainer.save_model(str(tmp_path / "final"))
    reloaded = PeftModel.from_pretrained(make().unload(), tmp_path / "final")
    assert torch.equal(logits(reloaded), logits(trainer.model))


def test_save_only_model_holds_the_whole_model(tmp_path):
    make = lambda: with_base_on_disk(torch.bfloat16, tmp_path / "base")  # noqa: E731
    trainer = make_trainer(
        make(), tmp_path / "out", save_only_model=True, save_strategy="steps", save_steps=4, max_steps=4
    )
    trainer.train()
    assert not (tmp_path / "out" / "checkpoint-4" / "optimizer.pt").exists()
    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4", dtype=torch.bfloat16)
    assert torch.equal(logits(reloaded), logits(trainer.model))


def test_save_total_limit_keeps_what_resumes(tmp_path):
    trainer = make_trainer(
        scratch(torch.float32), tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1, max_steps=6
    )
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    resumed = make_trainer(scratch(torch.float32), tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert_same_state(trainer.model, resumed.model)


def train_and_die(output_dir: str, where: str) -> None:
    """Train with a checkpoint at every second step, and kill this process at step 6, in training or in the save."""

    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Die(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 5 and where == "epoch":
                die()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6 and where == "adapter written":
                Trainer._save_optimizer_and_scheduler = die

    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = make_trainer(
        scratch(torch.float32), Path(output_dir), callbacks=[Die()], save_strategy="steps", save_steps=2
    )
    trainer.train()


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of runs that were killed, by where; the processes run side by side."""
    folders = {where: tmp_path_factory.mktemp("killed") for where in WHERE}
    code = "import sys; from tests.integration.test_poetx_resume import train_and_die; train_and_die(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(folder), where], env=environment, cwd=ROOT)
        for where, folder in folders.items()
    ]
    assert [process.wait(timeout=120) for process in processes] == [-signal.SIGKILL] * len(folders)
    return folders


WHERE = ("epoch", "adapter written")


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory) -> Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(scratch(torch.float32), tmp_path_factory.mktemp("unkilled"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("where", WHERE)
def test_killed_run_resumes_from_its_last_whole_checkpoint(killed_runs, unkilled, where):
    folder = killed_runs[where]
    assert (folder / ".saving" / "checkpoint-6" / "adapter_model.safetensors").exists() == (where != "epoch")
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-4")
    torch.manual_seed(5)
    resumed = make_trainer(scratch(torch.float32), folder, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    expected = losses(unkilled)
    assert losses(resumed) == expected
    assert_same_state(resumed.model, unkilled.model)
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-8")
    assert not (folder / ".saving").exists()


def interrupt(where: str) -> Callable[..., None]:
    def raising(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt(where)

    return raising


def test_interrupted_save_leaves_an_older_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make_trainer(scratch(torch.float32), tmp_path, **saving).train()
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_optimizer_and_scheduler", interrupt("save"))
        with pytest.raises(KeyboardInterrupt):
            make_trainer(scratch(torch.float32), tmp_path, **saving, learning_rate=1e-3).train()
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()} == before
    make_trainer(scratch(torch.float32), tmp_path, **saving, learning_rate=1e-3).train()
    after = (tmp_path / "checkpoint-2" / "adapter_model.safetensors").read_bytes()
    assert after != before["adapter_model.safetensors"] and not (tmp_path / ".saving").exists()


def test_checkpoint_is_pushed_under_its_own_name(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(folder))
    trainer = make_trainer(tiny_poetx(), tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.args.push_to_hub, trainer.init_hf_repo = True, lambda *args, **kwargs: None
    trainer._finish_current_push = lambda: None
    trainer.train()
    assert pushed == [str(tmp_path / "checkpoint-2")] and (tmp_path / "checkpoint-2").is_dir()


def test_interrupted_adapter_file_leaves_the_older_one_as_it_was(tmp_path, monkeypatch):
    import peft.peft_model

    model = tiny_poetx()
    model.save_pretrained(tmp_path)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()
    assert not list(tmp_path.glob("*.partial"))

    def half(tensors: dict, filename: str, **kwargs: object) -> None:
        Path(filename).write_bytes(before[:100])
        raise KeyboardInterrupt

    from hf_poetx.trainer import _aside_then_renamed

    monkeypatch.setattr(peft.peft_model, "safe_save_file", _aside_then_renamed(half))
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
