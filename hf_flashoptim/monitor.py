"""What compression costs, in the Trainer's logs."""

import sys
import time
import warnings
from typing import Any

import torch
from torch import nn
from transformers import IntervalStrategy, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_flashoptim.diagnostics import CompressionError, compression_report
from hf_flashoptim.gradient_release import unwrap
from hf_flashoptim.optimizer import FlashOptimizer


class FlashMonitorCallback(TrainerCallback):
    """Logs what compression costs, at every logging step, and warns of layers that it does not suit.

    Where logs are written once an epoch, compression is measured in its first step.

    Adds to the logs (also ``trainer.state.log_history``): ``flash_step_ms``, time of the optimizer's step;
    ``flash_peak_memory_gib``, of the GPU or, on a CPU, of the process; ``flash_nmse_<moment>``, the mean over
    parameters of ``CompressionError.nmse``; ``flash_lost_updates``, mean share of updates that round to nothing.

    Args:
        nmse_threshold: parameters with a larger error in a moment are warned of, once each.
        lost_threshold: as for the share of lost updates.
    """

    def __init__(self, nmse_threshold: float = 1e-2, lost_threshold: float = 0.5) -> None:
        self._thresholds = (nmse_threshold, lost_threshold)
        self._metrics: dict[str, float] = {}
        self._warned: set[str] = set()
        self._started = 0.0
        self._epoch_begins = False

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure in the next step if logs are written once an epoch."""
        self._epoch_begins = True

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Measure, if this step will be logged, before anything moves."""
        optimizer = unwrap(optimizer)
        if isinstance(optimizer, FlashOptimizer) and self._is_logged(args, state):
            if optimizer.gradient_release is not None:
                self._warn_once("", "With gradient release, compression errors are not measured: gradients are gone.")
            else:
                self._measure(compression_report(optimizer, model))
        _synchronize()
        self._started = time.perf_counter()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the time of the step."""
        _synchronize()
        self._metrics["flash_step_ms"] = round((time.perf_counter() - self._started) * 1e3, 3)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measurements to training logs."""
        if logs is None or "loss" not in logs or not self._metrics:
            return
        self._metrics["flash_peak_memory_gib"] = round(_peak_memory() / 2**30, 3)
        logs.update(self._metrics)
        state.log_history[-1].update(self._metrics)
        self._metrics = {}

    def _is_logged(self, args: TrainingArguments, state: TrainerState) -> bool:
        step, begins = state.global_step + 1, self._epoch_begins
        self._epoch_begins = False
        if args.logging_strategy == IntervalStrategy.EPOCH:
            return begins
        return step % max(1, int(state.logging_steps or 1)) == 0 or (step == 1 and args.logging_first_step)

    def _measure(self, report: dict[str, CompressionError]) -> None:
        errors: dict[str, list[float]] = {}
        nmse_threshold, lost_threshold = self._thresholds
        for name, error in report.items():
            for moment, nmse in error.nmse.items():
                errors.setdefault(f"flash_nmse_{moment}", []).append(nmse)
                if nmse > nmse_threshold:
                    self._warn_once(
                        name,
                        f"{name} is sensitive to quantization: the NMSE of its {moment} is {nmse:.2g}. Keep it out of "
                        f"compression with optim_args='exempt={name}'.",
                    )
            errors.setdefault("flash_lost_updates", []).append(error.lost_updates)
            if error.lost_updates > lost_threshold:
                self._warn_once(
                    f"{name} lost",
                    f"{error.lost_updates:.0%} of the updates of {name} round to nothing. Raise the learning rate, or "
                    f"set optim_args='master_weight_bits=32' (or 'exempt={name}').",
                )
        self._metrics = {key: sum(values) / len(values) for key, values in errors.items()}

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=2)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory() -> float:
    """Bytes."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
