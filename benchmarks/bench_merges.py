"""What a thousand merges do to a weight: drift of its singular values and of its norm, by how it is stored and merged.

    python benchmarks/bench_merges.py

A 512 x 512 weight, blocks of 128, skew entries N(0, 0.01) drawn anew before each of 1000 merges; largest singular value
of Q about 0.23. `polynomial` merges what the forward pass computes, without the exact transform: the control that fails.
Minutes on a CPU; results go to `benchmarks/results/merges.json` and `.png`.
"""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
import torch
from torch import nn

from hf_poetx import PoetXConfig, get_poetx_model
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.report import spectrum_drift

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
WIDTH, BLOCK, Q, MERGES, EVERY = 512, 128, 0.01, 1000, 50
KINDS = {
    "bf16, polynomial": (torch.bfloat16, {}, False),
    "bf16": (torch.bfloat16, {}, True),
    "bf16 and 8 error bits": (torch.bfloat16, {"base_error_bits": 8}, True),
    "fp32": (torch.float32, {}, True),
}


def drift_over_merges(dtype: torch.dtype, options: dict[str, int], exact: bool) -> dict[str, list[float]]:
    """Largest relative drift of a singular value, and the norm against that at the start, every 50 merges."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(dtype)
    nn.init.normal_(base[0].weight, std=WIDTH**-0.5)
    model = get_poetx_model(base, PoetXConfig(block=BLOCK, track_spectrum=True, **options))
    ((_, layer),) = poetx_layers(model)
    start = layer.poetx_start_spectrum["default"].clone()
    drifts, norms = [], []
    for merge in range(1, MERGES + 1):
        for parameter in layer.skew_parameters("default"):
            nn.init.normal_(parameter, std=Q)
        if exact:
            layer.merge_then_reinitialize("default")
        else:
            layer._set_natural_weight(layer.effective_weight("default"))
            layer.reinitialize("default")
        if merge % EVERY == 0:
            weight = layer.base_weight("default").float()
            drifts.append(spectrum_drift(weight, start))
            norms.append((weight.norm() / start.norm()).item())
    return {"drift": drifts, "norm": norms}


def plot(kinds: dict[str, dict[str, list[float]]]) -> None:
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    merges = range(EVERY, MERGES + 1, EVERY)
    for name, record in kinds.items():
        axis.plot(merges, record["drift"], label=name)
    axis.axhline(0.01, color="gray", linestyle=":", label="bound")
    axis.set(yscale="log", xlabel="merges", ylabel="largest relative drift of a singular value")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(RESULTS / "merges.png", dpi=110)


def main() -> None:
    kinds = {name: drift_over_merges(*kind) for name, kind in KINDS.items()}
    for name, record in kinds.items():
        print(f"{name:24} drift {record['drift'][-1]:.1e}, norm {record['norm'][-1]:.6f} after {MERGES} merges")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/bench_merges.py",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "every": EVERY,
        "kinds": kinds,
    }
    (RESULTS / "merges.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(kinds)


if __name__ == "__main__":
    main()
