"""Accuracy of FlashAdamW's total update after 50 steps against AdamW in fp64, by the scale of the gradients.

python benchmarks/bench_gradient_scale.py [--output FOLDER] [--plot]

Parameters start at 0; gradients are scale x (fixed N(0,1) + N(0,1)); lr 1e-3, eps 1e-15 (1e-30 below 1e-10). Two hard
cases beside them: magnitudes within a group that are log-normal, and half of all gradients zero.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import torch
from torch import Tensor

import hf_flashoptim

STEPS, SHAPE = 50, (256, 256)
SCALES = [10.0**exponent for exponent in range(-20, 11)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def scaled_gradients(scale: float) -> Iterator[Tensor]:
    """The design's gradients, in fp64."""
    generator = torch.Generator().manual_seed(0)
    fixed = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    for _ in range(STEPS):
        yield (fixed + torch.randn(SHAPE, generator=generator, dtype=torch.float64)) * scale


def log_normal_gradients() -> Iterator[Tensor]:
    """Magnitudes of a group spread by exp(N(0,1))."""
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.randn(SHAPE, generator=generator, dtype=torch.float64).exp()
    for gradient in scaled_gradients(1e-3):
        yield gradient * magnitude


def sparse_gradients() -> Iterator[Tensor]:
    """Magnitudes spread by exp(2 N(0,1)), and half of all gradients zero at every step."""
    generator = torch.Generator().manual_seed(0)
    magnitude = (2 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).exp()
    for gradient in scaled_gradients(1e-3):
        yield gradient * magnitude * (torch.rand(SHAPE, generator=generator) < 0.5)


def total_update(
    make: Callable[..., torch.optim.Optimizer],
    gradients: Iterator[Tensor],
    dtype: torch.dtype,
    eps: float,
    device: str,
) -> Tensor:
    """What the steps add to a parameter that starts at 0, in fp64; of the master weight, if there is one."""
    p = torch.nn.Parameter(torch.zeros(SHAPE, dtype=dtype, device=device))
    model = torch.nn.ParameterDict({"p": p})
    optimizer = make([p], lr=1e-3, eps=eps, weight_decay=0.0)
    for gradient in gradients:
        p.grad = gradient.to(device, dtype)
        optimizer.step()
    if hasattr(optimizer, "get_fp32_model_state_dict"):
        return optimizer.get_fp32_model_state_dict(model)["p"].cpu().double()
    return p.detach().cpu().double()


def errors(make: Callable[..., torch.optim.Optimizer], source: Callable[[], Iterator[Tensor]], eps: float) -> dict:
    """Relative error of the total update, and the largest element's update over the largest true one, by dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {}
    for name, dtype in DTYPES.items():
        rounded = [g.to(dtype).double() for g in source()]
        truth = total_update(torch.optim.AdamW, iter(rounded), torch.float64, eps, "cpu")
        update = total_update(make, iter(rounded), dtype, eps, device)
        error = ((update - truth).norm() / truth.norm()).item()
        result[name] = {"error": error, "largest_ratio": (update.abs().max() / truth.abs().max()).item()}
    return result


def plot(folder: Path) -> None:
    """Draw the error by gradient scale."""
    import matplotlib.pyplot as plt

    results = json.loads((folder / "gradient_scale.json").read_text())["results"]
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for name, color in (("flashoptim", "tab:gray"), ("ours", "tab:blue")):
        for dtype, style in (("bf16", "-"), ("fp32", ":")):
            if name in results:
                rows = results[name]["scales"]
                values = [min(row[dtype]["error"], 1e4) for row in rows.values()]
                axis.loglog([float(scale) for scale in rows], values, style, color=color, label=f"{name}, {dtype}")
    axis.axhline(0.01, color="black", linewidth=0.5)
    axis.set_xlabel("scale of the gradients")
    axis.set_ylabel("relative error of the total update (cut at 1e4)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "gradient_scale.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.output)
        return
    makers = {"ours": hf_flashoptim.FlashAdamW}
    if importlib.util.find_spec("flashoptim"):
        import flashoptim

        makers["flashoptim"] = flashoptim.FlashAdamW
    results = {}
    for name, make in makers.items():

        def make_for(params: list[Tensor], make: type = make, **options: object) -> torch.optim.Optimizer:
            bits = {} if params[0].dtype != torch.float32 else {"master_weight_bits": None}
            return make(params, **options, **bits)

        scales = {
            f"{scale:.0e}": errors(make_for, lambda s=scale: scaled_gradients(s), 1e-30 if scale < 1e-10 else 1e-15)
            for scale in SCALES
        }
        results[name] = {
            "scales": scales,
            "log_normal": errors(make_for, log_normal_gradients, 1e-15),
            "half_zero": errors(make_for, sparse_gradients, 1e-15),
        }
        worst = max(row[dtype]["error"] for row in scales.values() for dtype in DTYPES)
        print(name, "worst error", worst, "hard cases", results[name]["log_normal"], results[name]["half_zero"])
    harness.write("gradient_scale", results, arguments.output)


if __name__ == "__main__":
    main()
