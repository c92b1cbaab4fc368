"""How orthogonal the trained transforms are, and what merges have done to the spectrum of the weights."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .base_weight import full_tensor
from .checkpoint import poetx_layers
from .layer import PoetXLayer
from .ops.cayley import largest_singular_value
from .rotation import full_precision
from .schedule import find_tuner, require_tuner


@dataclass(frozen=True)
class LayerOrthogonality:
    """One layer's figures.

    `sigma`: largest singular value of a skew matrix Q; `defect`: how far the forward pass's blocks are from orthogonal,
    ``2 sigma^4 - sigma^8`` in the spectral norm; `norm`: Frobenius norm of the effective weight against the start;
    `drift`: ``max |s_i - s_i at start| / mean(s at start)`` over its singular values, None where the start is not known.
    """

    name: str
    merges: int
    sigma: float
    defect: float
    norm: float
    drift: float | None


@dataclass(frozen=True)
class OrthogonalityReport:
    """Figures of all layers of an adapter; `str()` of it is a table."""

    layers: list[LayerOrthogonality]

    def largest(self, figure: str) -> float | None:
        """Largest `sigma`, `defect` or `drift` of any layer; None if unknown for all."""
        known = [value for layer in self.layers if (value := getattr(layer, figure)) is not None]
        return max(known, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len("layer"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'layer':<{width}}  merges     sigma    defect      norm     drift"]
        for layer in self.layers:
            drift = "        -" if layer.drift is None else f"{layer.drift:9.2e}"
            lines.append(
                f"{layer.name:<{width}}  {layer.merges:6d} {layer.sigma:9.2e} {layer.defect:9.2e} {layer.norm:9.6f} {drift}"
            )
        if self.largest("drift") is None:
            lines.append("drift is unknown: the weights were merged into, and track_spectrum=False")
        return "\n".join(lines)


@torch.no_grad()
def orthogonality_report(model: nn.Module, spectrum: bool = True) -> OrthogonalityReport:
    """Measure the active adapter of a model.

    Args:
        model: from `get_poetx_model`, also inside wrappers.
        spectrum: compute singular values for the drift; the costly part, seconds for a large layer. Without it, or
            where the start is not known (merged, and not trained with ``track_spectrum=True``), drift is None.
    """
    tuner = require_tuner(model)
    name = tuner.active_adapters[0]
    layers = [layer for _, layer in poetx_layers(tuner) if name in layer.poetx_config]
    return OrthogonalityReport([_measure(layer, name, spectrum) for layer in layers])


def _measure(layer: PoetXLayer, adapter_name: str, spectrum: bool) -> LayerOrthogonality:
    parameters = layer.skew_parameters(adapter_name)
    sigma = max((largest_singular_value(full_tensor(p)).max().item() for p in parameters), default=0.0)
    effective = layer.effective_weight(adapter_name).float()
    merges = int(layer.poetx_merge_count[adapter_name])
    start_norm = layer.poetx_start_frobenius[adapter_name] if adapter_name in layer.poetx_start_frobenius else math.nan
    drift = None
    with full_precision(effective.device):
        if spectrum and adapter_name in layer.poetx_start_spectrum:
            drift = spectrum_drift(effective, layer.poetx_start_spectrum[adapter_name])
        elif spectrum and merges == 0:
            drift = spectrum_drift(effective, torch.linalg.svdvals(layer.base_weight(adapter_name).float()))
    return LayerOrthogonality(
        name=layer.canonical_name,
        merges=merges,
        sigma=sigma,
        defect=2 * sigma**4 - sigma**8,
        norm=effective.norm().item() / float(start_norm),
        drift=drift,
    )


def spectrum_drift(weight: torch.Tensor, start: torch.Tensor) -> float:
    """``max |s_i - s_i at start| / mean(s at start)`` for a weight and the sorted singular values it started with."""
    values = torch.linalg.svdvals(weight.float())
    return ((values - start).abs().max() / start.mean()).item()


class OrthogonalityCallback(TrainerCallback):
    """Adds the largest sigma, defect and drift, and the norm furthest from 1, to every log of the Trainer.

    They appear as ``poetx/sigma`` and so on, in what is printed and in ``trainer.state.log_history``.

    Args:
        spectrum: also compute the drift, which costs singular values of every layer.
    """

    def __init__(self, spectrum: bool = False) -> None:
        self.spectrum = spectrum

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, model=None, **kwargs
    ):
        # Only logs of training: those of evaluation and of the end are of the same weights again.
        if not logs or "loss" not in logs or model is None or find_tuner(model) is None:
            return
        report = orthogonality_report(model, self.spectrum)
        figures = {f"poetx/{figure}": report.largest(figure) for figure in ("sigma", "defect", "drift")}
        figures["poetx/norm"] = max((layer.norm for layer in report.layers), key=lambda norm: abs(norm - 1))
        figures = {key: value for key, value in figures.items() if value is not None}
        logs.update(figures)
        # The Trainer keeps a copy that it made before it called.
        state.log_history[-1].update(figures)
