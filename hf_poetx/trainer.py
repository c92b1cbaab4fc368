"""POET-X inside transformers' Trainer: nothing has to be passed for merging, parameter groups and safe resuming."""

import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.trainer
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint import poetx_layers
from .config import POETX
from .optimizer import add_skew_groups, check_resettable, trainable_skew, unwrap_optimizer
from .schedule import MergeReport, find_tuner, merge_interval, merge_then_reinitialize

# Clip warm-up is for the start of a training; later steps are small anyway.
CLIP_WARMUP_UNTIL = 2000


class PoetXCallback(TrainerCallback):
    """Merges a POET-X model periodically, on `global_step`; every Trainer has one, and it does nothing for other models.

    Attributes:
        reports: of the merges of the current training, by step.
    """

    def __init__(self) -> None:
        self.reports: dict[int, MergeReport] = {}
        self._interval = 0
        self._max_grad_norm = 0.0

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        if model is not None and _uses_fsdp(args):
            # accelerate cannot distribute plain persistent buffers; adapters are saved from the modules anyway.
            for _, layer in poetx_layers(model):
                for name in layer.buffer_names:
                    buffers = getattr(layer, name)
                    buffers._non_persistent_buffers_set.update(buffers.keys())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        self._interval = 0
        tuner = None if model is None else find_tuner(model)
        skew = {} if tuner is None else trainable_skew(tuner)
        if not skew:
            return
        optimizer = kwargs.get("optimizer")
        _warn_about_decay(optimizer, skew)
        if not merge_interval(tuner):
            return
        owner = getattr(tuner, "_trainer_clock", None)
        if owner is not None and owner[0] is state and owner[1] is not self:
            # The same class was passed by hand as well; one of the two is enough.
            return
        if tuner.clock not in (None, "Trainer"):
            raise ValueError(f"{tuner.clock} merges this model already; the Trainer would be a second clock")
        _refuse_what_loses_base_weights(args)
        check_resettable(optimizer)
        tuner.clock, tuner._trainer_clock = "Trainer", (state, self)
        for _, layer in poetx_layers(tuner):
            # The best checkpoint may be from before the first merge, which live weights cannot go back to.
            layer.save_base_weight = bool(args.load_best_model_at_end)
        self._interval, self._max_grad_norm, self.reports = merge_interval(tuner), args.max_grad_norm, {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        if self._interval and args.max_grad_norm:
            warmup = max(find_tuner(model).peft_config[name].clip_warmup for name in find_tuner(model).active_adapters)
            args.max_grad_norm = self._max_grad_norm * clip_factor(state.global_step, self._interval, warmup)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs):
        if not self._interval:
            return
        # Before anything is saved: training_args.bin must hold the user's value.
        args.max_grad_norm = self._max_grad_norm
        if state.global_step % self._interval == 0:
            self.reports[state.global_step] = merge_then_reinitialize(model, kwargs["optimizer"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs
    ):
        if self._interval:
            args.max_grad_norm = self._max_grad_norm
            tuner = find_tuner(model)
            tuner.clock, tuner._trainer_clock = None, None
            self._interval = 0


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


def _uses_fsdp(args: TrainingArguments) -> bool:
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def _refuse_what_loses_base_weights(args: TrainingArguments) -> None:
    """Frozen weights that merges change must reach the checkpoint; where they would not, say so at the start."""
    if args.deepspeed:
        raise ValueError("DeepSpeed drops frozen weights, which merges change: use PoetXConfig(merge_interval=0)")
    if not _uses_fsdp(args):
        return
    settings = args.fsdp_config or {}
    version = str(settings.get("version", settings.get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))))
    kind = str(settings.get("state_dict_type", os.environ.get("FSDP_STATE_DICT_TYPE", ""))).upper()
    if version != "2":
        raise ValueError(f"FSDP version {version} cannot merge: set fsdp_version 2, or PoetXConfig(merge_interval=0)")
    if kind == "FULL_STATE_DICT":
        raise ValueError("FULL_STATE_DICT drops frozen weights, which merges change: use SHARDED_STATE_DICT")


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
        optimizer_cls, kwargs = original(args, model)
        if model is None or not trainable_skew(model):
            return optimizer_cls, kwargs
        if not isinstance(optimizer_cls, type) or "model" in kwargs or "optimizer_dict" in kwargs:
            raise ValueError(
                f"optim={str(args.optim)!r} builds its own parameter groups, in which POET-X skew entries cannot have "
                "their learning rate; use an optimizer that takes groups, such as flash_adamw or adamw_torch"
            )
        groups = kwargs.get("params") or _trainer_groups(args, model)
        return optimizer_cls, {**kwargs, "params": add_skew_groups(groups, model, args.learning_rate)}

    return get_optimizer_cls_and_kwargs


def _trainer_groups(args: TrainingArguments, model: nn.Module) -> list[dict[str, Any]]:
    """The groups that the Trainer would make: weight decay for all but norms and biases."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]


def _whole_checkpoints_only(original: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Let ``resume_from_checkpoint=True`` pass over a checkpoint whose save was interrupted.

    The Trainer writes `trainer_state.json` last, so a checkpoint without a readable one is not whole.
    """

    @functools.wraps(original)
    def get_last_checkpoint(folder: str) -> str | None:
        numbered = {}
        for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
            if path.is_dir() and number.isdigit():
                numbered[int(number)] = path
        for _, path in sorted(numbered.items(), reverse=True):
            try:
                json.loads((path / "trainer_state.json").read_text())
                return str(path)
            except (OSError, ValueError):
                warnings.warn(
                    f"{path} is not whole, its save was interrupted; resuming from the one before", stacklevel=2
                )
        return None

    return get_last_checkpoint


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
    transformers.trainer.get_last_checkpoint = _whole_checkpoints_only(transformers.trainer.get_last_checkpoint)
    PeftModel.load_adapter = _through_the_cpu(PeftModel.load_adapter)
