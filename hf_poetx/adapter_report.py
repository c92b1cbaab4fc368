"""Norm and spectrum of an adapter's layers, from its file and the base model's, one layer in memory at a time."""

from pathlib import Path
from typing import NamedTuple

import torch

from .adapter_file import AdapterFile, fetch
from .merge_plan import LayerWeight, plan_from_file, plan_on_base
from .report import spectrum_drift
from .rotation import full_precision


class LayerSpectrum(NamedTuple):
    """A layer's figures as in `orthogonality_report`; `norm` and `drift` are None where the start is not known."""

    name: str
    merges: int
    sigma: float
    defect: float
    norm: float | None
    drift: float | None


def measure_layers(adapter: AdapterFile, base: str | Path | None = None) -> list[LayerSpectrum]:
    """Measure every layer of an adapter on disk.

    Args:
        adapter: opened.
        base: folder or repository of the base model; by default the one that the adapter names.

    Raises:
        FileNotFoundError: if the base model is needed and not there.
        ValueError: if it does not belong to the adapter.
    """
    if adapter.from_scratch:
        plan = plan_from_file(adapter, None)
    else:
        name = base or adapter.base_name
        if name is None:
            raise ValueError(f"{adapter.folder} names no base model; say which with --base")
        plan = plan_on_base(adapter, fetch(name, "*.safetensors", "base model"), None, check_base=True)
    return [
        LayerSpectrum(*figures, *_norm_and_drift(plan.weights[figures.name], figures.merges))
        for figures in adapter.figures()
    ]


@torch.no_grad()
def _norm_and_drift(weight: LayerWeight, merges: int) -> tuple[float | None, float | None]:
    effective = weight.effective().float()
    start_norm, spectrum = (
        weight.adapter.part(weight.layer, part) for part in ("poetx_start_frobenius", "poetx_start_spectrum")
    )
    norm = None if start_norm is None else effective.norm().item() / float(start_norm)
    with full_precision(effective.device):
        if spectrum is None and merges == 0:
            spectrum = torch.linalg.svdvals(weight.frozen().float())
        return norm, None if spectrum is None else spectrum_drift(effective, spectrum)
