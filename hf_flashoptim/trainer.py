"""FlashOptim inside transformers' Trainer: ``optim="flash_adamw"`` and its siblings, and gradient release.

Everything of ``TrainingArguments.optim_args`` is read here: a comma-separated list of ``key=value``, where keys are
the keyword arguments of the optimizer (``betas`` as ``beta1`` and ``beta2``) and those of ``TrainerOptions``.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import transformers.trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext, _parse_optim_args
from transformers.training_args import OptimizerNames, ParallelMode

from hf_flashoptim.adam import FlashAdam, FlashAdamW
from hf_flashoptim.enum_member import add_str_enum_member
from hf_flashoptim.gradient_release import CLIP_MODES, enable_gradient_release, unwrap
from hf_flashoptim.lion import FlashLion
from hf_flashoptim.optimizer import FlashOptimizer
from hf_flashoptim.sgd import FlashSGD, FlashSGDW

OPTIMIZERS: dict[str, type[FlashOptimizer]] = {
    "flash_adamw": FlashAdamW,
    "flash_adam": FlashAdam,
    "flash_sgd": FlashSGD,
    "flash_sgdw": FlashSGDW,
    "flash_lion": FlashLion,
}
# Keyword arguments that TrainingArguments have a field of their own for.
_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay", "params": None, "betas": None}


@dataclass(frozen=True)
class TrainerOptions:
    """Keys of ``optim_args`` that are not the optimizer's.

    Attributes:
        exempt: parameters kept out of compression (fp32 moments and, in 16 bits, a 32-bit master weight): fnmatch
            patterns of parameter or module names, separated by ``|``, such as ``lm_head|*.embed_tokens``.
        gradient_release: step during the backward pass.
        release_max_grad_norm: with it, clip gradients to this norm; 0 for no clipping.
        release_clip: how, see ``gradient_release.Clipping``.
    """

    exempt: str = ""
    gradient_release: bool = False
    release_max_grad_norm: float = 0.0
    release_clip: str = CLIP_MODES[0]


def read_optim_args(name: str, optim_args: str | None) -> tuple[dict[str, Any], TrainerOptions]:
    """Keyword arguments of the optimizer called ``name``, and the Trainer's own options.

    Raises:
        ValueError: for text that is not ``key=value,...``, an unknown key, or a value of another type; it lists what
            is valid.
    """
    parameters = inspect.signature(OPTIMIZERS[name]).parameters
    valid: dict[str, Any] = {key: p.default for key, p in parameters.items() if key not in _FIELDS}
    if "betas" in parameters:
        valid.update(zip(("beta1", "beta2"), parameters["betas"].default, strict=True))
    own = {field.name: field.default for field in fields(TrainerOptions)}
    try:
        items = _parse_optim_args(optim_args)
    except ValueError as error:
        raise ValueError(f"optim_args={optim_args!r} is not of the form 'key=value,key=value'.") from error
    values = {}
    for key, text in items.items():
        if _FIELDS.get(key):
            raise ValueError(f"optim_args={optim_args!r}: set TrainingArguments.{_FIELDS[key]} instead of {key!r}.")
        if key not in valid and key not in own:
            raise ValueError(
                f"optim_args={optim_args!r}: {name} has no {key!r}. Valid keys: {', '.join(sorted({**valid, **own}))}."
            )
        values[key] = _convert(key, text, {**valid, **own}[key])
    options = TrainerOptions(**{key: values.pop(key) for key in own if key in values})
    if options.release_clip not in CLIP_MODES:
        raise ValueError(f"release_clip={options.release_clip!r} is not valid; choose one of {CLIP_MODES}.")
    if options.release_max_grad_norm and not options.gradient_release:
        raise ValueError(
            f"optim_args={optim_args!r}: release_max_grad_norm clips with gradient_release=true only; add it, or set "
            "TrainingArguments.max_grad_norm instead."
        )
    return values, options


def _convert(key: str, text: str, default: Any) -> Any:
    """Text of ``optim_args`` as a value of the default's type."""
    lowered = text.lower()
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[lowered]
        if key == "master_weight_bits" and lowered == "none":
            return None
        if isinstance(default, int):
            return int(text)
        return float(text) if isinstance(default, float) else text
    except (KeyError, ValueError) as error:
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ValueError(f"optim_args: {key}={text!r} is not valid; it must be {kind}.") from error


def _handler(name: str) -> Callable[[OptimizerContext], tuple[type[FlashOptimizer], dict[str, Any]]]:
    def make(context: OptimizerContext) -> tuple[type[FlashOptimizer], dict[str, Any]]:
        values, options = read_optim_args(name, _joined(context.optim_args))
        cls = OPTIMIZERS[name]
        parameters = inspect.signature(cls).parameters
        kwargs = dict(context.optimizer_kwargs)
        if "eps" in parameters:
            kwargs["eps"] = context.adam_kwargs["eps"]
        if "betas" in parameters:
            beta1, beta2 = _betas(context, parameters["betas"].default)
            kwargs["betas"] = (values.pop("beta1", beta1), values.pop("beta2", beta2))
        kwargs.update(values)
        if options.exempt:
            cls = exempting(cls, _matching(context.model, options.exempt))
        return cls, kwargs

    return make


def _joined(optim_args: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in optim_args.items())


def _betas(context: OptimizerContext, own: tuple[float, float]) -> tuple[float, float]:
    """The Adam betas of TrainingArguments; where they are untouched, the optimizer's own (Lion's differ)."""
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    untouched = (defaults["adam_beta1"], defaults["adam_beta2"])
    betas = tuple(context.adam_kwargs["betas"])
    return own if betas == untouched else betas


def _matching(model: nn.Module | None, patterns: str) -> list[Tensor]:
    """Parameters whose name, or whose module's or an outer module's name, matches one of the patterns."""
    if model is None:
        raise ValueError("optim_args: 'exempt' needs the model to look for names in.")
    found: dict[Tensor, None] = {}
    for pattern in patterns.split("|"):
        matches = []
        for name, p in model.named_parameters(remove_duplicate=False):
            parts = name.split(".")
            if any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1)):
                matches.append(p)
        if not matches:
            raise ValueError(
                f"optim_args: exempt={pattern!r} matches no parameter. Patterns match full dotted names, such as "
                f"{', '.join(repr(name) for name, _ in list(model.named_parameters())[-3:])}; '*' matches anything."
            )
        if not any(p.requires_grad for p in matches):
            warnings.warn(
                f"optim_args: exempt={pattern!r} matches frozen parameters only, so it changes nothing.", stacklevel=2
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _new(cls: type[FlashOptimizer]) -> FlashOptimizer:
    return cls.__new__(cls)


def exempting(cls: type[FlashOptimizer], exempt: Iterable[Tensor]) -> type[FlashOptimizer]:
    """A subclass that moves these parameters, whatever group they come in, to groups without compression."""
    chosen = set(exempt)

    class Exempting(cls):
        def __init__(self, params: Iterable[Any], **kwargs: Any) -> None:
            groups = [g if isinstance(g, dict) else {"params": [g]} for g in params]
            bits = 32 if kwargs.get("master_weight_bits", 24) is not None else None
            rest, own = [], []
            for group in groups:
                members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
                apart = [m for m in members if (m[1] if isinstance(m, tuple) else m) in chosen]
                rest.append({**group, "params": [m for m in members if not any(m is a for a in apart)]})
                if apart:
                    own.append({**group, "params": apart, "quantize": False, "master_weight_bits": bits})
            super().__init__([*rest, *own], **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            # The groups say all: a copy or a pickle is an optimizer of the class itself.
            return _new, (cls,), self.__getstate__()

    Exempting.__name__ = Exempting.__qualname__ = cls.__name__
    return Exempting


class GradientReleaseCallback(TrainerCallback):
    """Turns gradient release on when ``optim_args`` ask for it; every Trainer has one.

    It starts with the training and not with the optimizer, which at its construction has not been prepared, loaded,
    nor given its schedule.
    """

    def __init__(self) -> None:
        self._handle = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse what no setting of these optimizers works with."""
        if args.optim in OPTIMIZERS:
            refuse_deepspeed(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check that gradient release can work, and enable it."""
        self.on_train_end(args, state, control)
        if args.optim not in OPTIMIZERS:
            return
        options = read_optim_args(_name(args), args.optim_args)[1]
        if not options.gradient_release:
            return
        refuse_what_needs_all_gradients(args, model)
        optimizer = unwrap(optimizer)
        if getattr(optimizer, "gradient_release", None) is not None:
            optimizer.gradient_release.remove()  # of a training that was broken off
        norm = options.release_max_grad_norm or None
        self._handle = enable_gradient_release(model, optimizer, max_grad_norm=norm, clip=options.release_clip)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the optimizer step as ever again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _name(args: TrainingArguments) -> str:
    """The optimizer's name; `TrainingArguments` has a member of its enum, unless it was set afterwards."""
    return str(OptimizerNames(args.optim).value)


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Raise when DeepSpeed is to drive a compressed optimizer, or to put one of its own in its place.

    Raises:
        ValueError: saying what to use instead.
    """
    # accelerate's launcher sets only the second one, in the Trainer's constructor.
    if args.deepspeed or getattr(args, "hf_deepspeed_config", None):
        raise ValueError(
            f"optim={_name(args)!r} cannot work with DeepSpeed, which flattens parameters: without rows, "
            "moments cannot be quantized. Use DDP, or FSDP2 (fsdp_version: 2), or one of DeepSpeed's optimizers."
        )


def refuse_what_needs_all_gradients(args: TrainingArguments, model: nn.Module) -> None:
    """Raise for settings that gradient release would silently ignore or get wrong.

    Raises:
        ValueError: naming the setting, why, and what to set instead.
    """
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    parallel = args.parallel_mode in (ParallelMode.DISTRIBUTED, ParallelMode.NOT_DISTRIBUTED) and not sharded
    refusals = [
        (
            args.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: every gradient is stepped at once. Set it "
            "to 1, with a larger per_device_train_batch_size.",
        ),
        (
            args.max_grad_norm > 0,
            f"max_grad_norm={args.max_grad_norm}: the global norm is known only when all gradients are gone. Set "
            "max_grad_norm=0 and, to clip by each parameter's norm or by the norm of the step before, "
            "optim_args='gradient_release=true,release_max_grad_norm=1.0,release_clip=parameter' (or previous_step).",
        ),
        (args.fp16, "fp16=True: GradScaler unscales all gradients after the backward pass. Set bf16=True instead."),
        (
            bool(args.deepspeed),
            "deepspeed: its engine keeps gradients in buffers of its own. Train without gradient release.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True: when memory runs out, part of the parameters have been stepped already. Set "
            "the batch size by hand.",
        ),
        (
            parallel,
            f"parallel_mode={args.parallel_mode.value}: DistributedDataParallel, DataParallel and FSDP1 keep gradients "
            "in buffers of their own. Use FSDP2, or one GPU.",
        ),
    ]
    for applies, reason in refusals:
        if applies:
            raise ValueError(f"Gradient release cannot work with {reason}")


def register_optimizers() -> None:
    """Make ``flash_*`` names of the Trainer's optimizers, once; ``import hf_flashoptim`` does it."""
    for name in OPTIMIZERS:
        add_str_enum_member(OptimizerNames, name.upper(), name)
        _OPTIMIZER_HANDLERS[name] = _handler(name)
    if GradientReleaseCallback not in transformers.trainer.DEFAULT_CALLBACKS:
        transformers.trainer.DEFAULT_CALLBACKS.append(GradientReleaseCallback)
