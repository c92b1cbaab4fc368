"""POET-X inside transformers' Trainer: nothing has to be passed for merging, parameter groups and safe resuming."""

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.peft_model
import transformers.trainer
from accelerate import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, rotate_checkpoints
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint import poetx_layers
from .config import POETX
from .model import PoetXModel
from .optimizer import add_skew_groups, check_resettable, trainable_skew, unwrap_optimizer
from .schedule import MergeReport, claim_clock, find_tuner, merge_interval, merge_then_reinitialize

# Clip warm-up is for the start of a training; later steps are small anyway.
CLIP_WARMUP_UNTIL = 2000
# Where a checkpoint is written before it has its name.
SAVING_DIR = ".saving"


class PoetXCallback(TrainerCallback):
    """Merges a POET-X model periodically, on `global_step`; every Trainer has one, and it does nothing for other models.

    Attributes:
        reports: of the merges of the current or last training, by step.
    """

    def __init__(self) -> None:
        self.reports: dict[int, MergeReport] = {}
        self._tuner: PoetXModel | None = None
        # What the user set, while a step runs under a smaller one.
        self._max_grad_norm: float | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        if model is not None and _fsdp_plugin(args) is not None:
            # accelerate cannot distribute plain persistent buffers; adapters are saved from the modules anyway.
            for _, layer in poetx_layers(model):
                for name in layer.buffer_names:
                    buffers = getattr(layer, name)
                    buffers._non_persistent_buffers_set.update(buffers.keys())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        # An attempt that ran out of memory begins again without having ended.
        self.release(args)
        tuner = None if model is None else find_tuner(model)
        skew = {} if tuner is None else trainable_skew(tuner)
        if not skew:
            return
        _warn_about_decay(kwargs.get("optimizer"), skew)
        if not merge_interval(tuner):
            return
        _refuse_what_loses_base_weights(args)
        check_resettable(kwargs.get("optimizer"))
        self._tuner, self.reports = claim_clock(model, "Trainer"), {}
        for _, layer in poetx_layers(tuner):
            # The best checkpoint may be from before the first merge, which live weights cannot go back to.
            layer.save_base_weight = bool(args.load_best_model_at_end)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        if self._tuner is None or not args.max_grad_norm:
            return
        self._restore_max_grad_norm(args)
        warmup = self._tuner.peft_config[self._tuner.active_adapters[0]].clip_warmup
        self._max_grad_norm = args.max_grad_norm
        args.max_grad_norm *= clip_factor(state.global_step, merge_interval(self._tuner), warmup)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        if self._tuner is None:
            return
        # Before anything is saved: training_args.bin must hold the user's value.
        self._restore_max_grad_norm(args)
        if state.global_step % merge_interval(self._tuner) == 0:
            self.reports[state.global_step] = merge_then_reinitialize(model, kwargs["optimizer"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        self.release(args)

    def release(self, args: TrainingArguments) -> None:
        """Leave the model to another clock, and the arguments as the user set them; also after a training that failed."""
        self._restore_max_grad_norm(args)
        if self._tuner is not None:
            for _, layer in poetx_layers(self._tuner):
                layer.save_base_weight = False
            self._tuner.clock = self._tuner = None

    def _restore_max_grad_norm(self, args: TrainingArguments) -> None:
        if self._max_grad_norm is not None:
            args.max_grad_norm, self._max_grad_norm = self._max_grad_norm, None


def clip_factor(step: int, interval: int, warmup: int) -> float:
    """Factor of `max_grad_norm` at the step after `step` completed ones.

    From the first merge until step 2000 it is ``0.1 + 0.9 k / warmup`` for the first `warmup` steps k after each merge,
    since the first gradients under new permutations meet an optimizer without a history.

    Example:
        >>> [round(clip_factor(step, 100, 10), 2) for step in (99, 100, 105, 110, 2000)]
        [1.0, 0.1, 0.55, 1.0, 1.0]
    """
    since = step % interval
    if step < interval or step >= CLIP_WARMUP_UNTIL or since >= warmup:
        return 1.0
    return 0.1 + 0.9 * since / warmup


def _fsdp_plugin(args: TrainingArguments) -> FullyShardedDataParallelPlugin | None:
    """What accelerate shards with, if asked to by the arguments or by its launcher."""
    if args.fsdp_plugin_args is not None:
        return FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return FullyShardedDataParallelPlugin()
    return None


def _refuse_what_loses_base_weights(args: TrainingArguments) -> None:
    """Frozen weights that merges change must reach the checkpoint; where they would not, say so at the start."""
    if args.deepspeed or args.deepspeed_plugin is not None:
        raise ValueError("DeepSpeed drops frozen weights, which merges change: use PoetXConfig(merge_interval=0)")
    plugin = _fsdp_plugin(args)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP version {plugin.fsdp_version} flattens parameters, so nothing can be merged: set 'version': 2 in "
            "fsdp_config, or PoetXConfig(merge_interval=0)"
        )
    if plugin.state_dict_type.name != "SHARDED_STATE_DICT":
        raise ValueError(
            f"{plugin.state_dict_type.name} drops frozen weights, which merges change: set 'state_dict_type': "
            "'SHARDED_STATE_DICT' in fsdp_config, or PoetXConfig(merge_interval=0)"
        )


def _warn_about_decay(optimizer: Any, skew: dict[nn.Parameter, float]) -> None:
    for group in unwrap_optimizer(optimizer).param_groups if optimizer is not None else ():
        if group.get("weight_decay") and any(parameter in skew for parameter in group["params"]):
            warnings.warn(
                f"weight_decay={group['weight_decay']} pulls the POET-X rotations towards the identity; build the "
                "optimizer with hf_poetx.create_poetx_optimizer, which keeps skew entries without decay",
                stacklevel=3,
            )
            return


def _with_skew_groups(
    original: Callable[..., tuple[Any, dict[str, Any]]],
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Let the Trainer build its optimizer with skew entries in groups of their own, whatever `optim` is."""

    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None):
        return _grouped(args, model, *original(args, model))

    return get_optimizer_cls_and_kwargs


def _with_skew_groups_of_class(original: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """The same for ``Trainer(optimizer_cls_and_kwargs=...)``."""

    @functools.wraps(original)
    def create_optimizer(self: Trainer, *args: Any, **kwargs: Any) -> Optimizer:
        if self.optimizer is None and self.optimizer_cls_and_kwargs is not None:
            self.optimizer_cls_and_kwargs = _grouped(self.args, self.model, *self.optimizer_cls_and_kwargs)
        return original(self, *args, **kwargs)

    return create_optimizer


def _grouped(
    args: TrainingArguments, model: nn.Module | None, optimizer_cls: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if model is None or not trainable_skew(model):
        return optimizer_cls, kwargs
    takes_groups = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)
    if not takes_groups or "model" in kwargs or "optimizer_dict" in kwargs:
        name = getattr(optimizer_cls, "__name__", optimizer_cls)
        raise ValueError(
            f"{name} (optim={getattr(args.optim, 'value', args.optim)!r}) makes its own parameter "
            "groups, in which POET-X skew entries cannot have their learning rate; use an optimizer that takes "
            "groups, such as flash_adamw or adamw_torch"
        )
    groups = kwargs.get("params") or _trainer_groups(args, model)
    return optimizer_cls, {**kwargs, "params": add_skew_groups(groups, model, kwargs.get("lr"))}


def _trainer_groups(args: TrainingArguments, model: nn.Module) -> list[dict[str, Any]]:
    """The groups that the Trainer would make: weight decay for all but norms and biases."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]


def _releasing_the_clock(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let training have one `PoetXCallback`, also if the user passed another, and end it also where training fails."""

    @functools.wraps(original)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        *others, callback = [c for c in self.callback_handler.callbacks if isinstance(c, PoetXCallback)] or [None]
        for other in others:
            self.remove_callback(other)
        try:
            return original(self, *args, **kwargs)
        finally:
            if callback is not None:
                callback.release(self.args)

    return train


def _checkpoint_aside(original: Callable[..., None]) -> Callable[..., None]:
    """Write a checkpoint in a folder aside and rename it when it is whole, so that an interrupted save never looks so."""

    @functools.wraps(original)
    def save_checkpoint(self: Trainer, model: nn.Module, trial: Any) -> None:
        if find_tuner(self.model) is None:
            return original(self, model, trial)
        folder = Path(self._get_output_dir(trial=trial))
        aside, name = folder / SAVING_DIR, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        pushed: list[str] = []
        self._get_output_dir, self._push_from_checkpoint = (lambda trial=None: str(aside)), pushed.append
        try:
            original(self, model, trial)
        finally:
            del self._get_output_dir, self._push_from_checkpoint
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(aside / name):
            self.state.best_model_checkpoint = str(folder / name)
            if self.args.should_save:
                self.state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
        if self.args.should_save:
            _move_checkpoint(aside, folder, name)
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0 and (aside / name).exists():
            # Another node, which shares no disk with the one that has just moved the rest.
            _move_checkpoint(aside, folder, name)
        if pushed:
            self._push_from_checkpoint(str(folder / name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    return save_checkpoint


def _move_checkpoint(aside: Path, folder: Path, name: str) -> None:
    """Two renames, since an older checkpoint of the same step could be deleted but in part."""
    if (folder / name).exists():
        (folder / name).rename(aside / "replaced")
    (aside / name).rename(folder / name)
    shutil.rmtree(aside)


def _aside_then_renamed(original: Callable[..., None]) -> Callable[..., None]:
    """Write an adapter file under another name first, so that an interrupted save leaves the older file as it was."""

    @functools.wraps(original)
    def save_file(tensors: dict[str, Any], filename: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        aside = f"{os.fspath(filename)}.partial"
        original(tensors, aside, *args, **kwargs)
        os.replace(aside, filename)

    return save_file


def _through_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load POET-X adapter files on the CPU: with base weights inside, a second copy of the model may not fit the GPU."""

    @functools.wraps(original)
    def load_adapter(self, model_id, adapter_name, *args, torch_device: str | None = None, **kwargs):
        if torch_device is None and not args and self.peft_type == POETX:
            torch_device = "cpu"
        return original(self, model_id, adapter_name, *args, torch_device=torch_device, **kwargs)

    return load_adapter


def install() -> None:
    """Join the Trainer, once: it has no other way in that a plain ``Trainer(...)`` would use."""
    if PoetXCallback in transformers.trainer.DEFAULT_CALLBACKS:
        return
    transformers.trainer.DEFAULT_CALLBACKS.append(PoetXCallback)
    Trainer.get_optimizer_cls_and_kwargs = staticmethod(_with_skew_groups(Trainer.get_optimizer_cls_and_kwargs))
    Trainer.create_optimizer = _with_skew_groups_of_class(Trainer.create_optimizer)
    Trainer.train = _releasing_the_clock(Trainer.train)
    Trainer._save_checkpoint = _checkpoint_aside(Trainer._save_checkpoint)
    peft.peft_model.safe_save_file = _aside_then_renamed(peft.peft_model.safe_save_file)
    PeftModel.load_adapter = _through_the_cpu(PeftModel.load_adapter)
