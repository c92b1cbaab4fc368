"""One linear layer, forward and backward, by number of tokens: activations rotated, or the rotations folded into W.

In mem mode, "..._mem", rotated activations are multiplied, and the weight is folded, once more in the backward pass.

    python benchmarks/bench_fold.py [--output FOLDER] [--plot]

All steps are replayed from CUDA graphs; a row's `eager` has the ratios of the same steps run eagerly, where the host
holds small ones up. With --plot, only draws what results/ holds.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_poetx.ops.fold import folding_pays
from hf_poetx.ops.poetx_linear import poetx_linear
from hf_poetx.ops.rotation import Rotation
from hf_poetx.ops.skew import num_entries
from hf_poetx.rotation import draw_permutation

SHAPES = [(512, 512), (512, 1376), (1024, 1024), (2048, 2048), (2048, 5632), (4096, 4096)]
TOKENS = [1024, 2048, 4096, 8192, 16384, 32768]
BLOCK, PERMUTATION_GROUP = 256, 32
# Memory mode of a way, and whether it folds.
WAYS = {
    "rotated": ("fast", False),
    "folded": ("fast", True),
    "rotated_mem": ("mem", False),
    "folded_mem": ("mem", True),
}


def make_rotation(width: int) -> Rotation:
    """Of a layer in the middle of training; columns beyond the last whole block form a tail."""
    full, rest = divmod(width, BLOCK)
    entries = nn.Parameter(0.01 * torch.randn(full, num_entries(BLOCK), device="cuda"))
    tail = nn.Parameter(0.01 * torch.randn(1, num_entries(rest), device="cuda")) if rest > 1 else None
    permutation = draw_permutation(width, PERMUTATION_GROUP, seed=0, name="layer", merge_count=0).cuda()
    return Rotation(entries, tail, permutation, PERMUTATION_GROUP)


def training_step(
    layer: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, trained: list[Tensor]
) -> Callable[[], None]:
    def step() -> None:
        layer(x).backward(gradient)
        for tensor in (x, *trained):
            tensor.grad = None

    return step


def measure(in_features: int, out_features: int, tokens: int) -> dict:
    torch.manual_seed(0)
    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, out_features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) / in_features**0.5
    trained_weight = nn.Parameter(weight.clone())
    rotations = [make_rotation(width) for width in (in_features, out_features)]
    entries = [t for rotation in rotations for t in rotation[:2] if t is not None]
    steps = {"linear": training_step(lambda x: F.linear(x, trained_weight), x, gradient, [trained_weight])}
    for name, (mode, folded) in WAYS.items():
        layer = functools.partial(
            poetx_linear, weight=weight, bias=None, rotation_in=rotations[0], rotation_out=rotations[1],
            memory_mode=mode, folded=folded,
        )  # fmt: skip
        steps[name] = training_step(layer, x, gradient, entries)
    row = {"in_features": in_features, "out_features": out_features, "tokens": tokens, "block": BLOCK}
    eager = harness.measure(steps, "linear", rounds=10, seconds=0.005)
    row["eager"] = {name: each["ratio"] for name, each in eager.items()}
    row["steps"] = harness.measure(
        {name: harness.graph(step) for name, step in steps.items()}, "linear", rounds=10, seconds=0.005
    )
    for name in steps:
        row["steps"][name]["peak_bytes"] = eager[name]["peak_bytes"]
    return row


def plot(folder: Path) -> None:
    """Draw the time of both ways by tokens, a layer in each panel."""
    import matplotlib.pyplot as plt

    rows = json.loads((folder / "fold.json").read_text())["results"]
    shapes = list(dict.fromkeys((row["in_features"], row["out_features"]) for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(2.6 * len(shapes), 2.8), sharey=True, layout="constrained")
    for axis, shape in zip(axes, shapes, strict=True):
        own = [row for row in rows if (row["in_features"], row["out_features"]) == shape]
        tokens = [row["tokens"] for row in own]
        for name, (mode, folded) in WAYS.items():
            ratios = [row["steps"][name]["ratio"] for row in own]
            color = "tab:orange" if folded else "tab:blue"
            axis.plot(tokens, ratios, "o-" if mode == "fast" else "o--", color=color, label=name, markersize=3)
            taken = [folding_pays(t, *shape, BLOCK, "cuda", mode) == folded for t in tokens]
            taken = [(t, ratio) for t, ratio, yes in zip(tokens, ratios, taken, strict=True) if yes]
            axis.plot(*zip(*taken, strict=True), "k.", markersize=9, zorder=0) if taken else None
        axis.axhline(1, color="black", linewidth=0.5)
        axis.set(xscale="log", title=f"{shape[0]} to {shape[1]}", xlabel="tokens", ylim=(0, 8.5))
    axes[0].set_ylabel("time, trainable linear layer = 1")
    axes[0].plot([], [], "k.", markersize=9, label="taken")
    axes[0].legend(fontsize="small")
    figure.savefig(folder / "fold.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--plot", action="store_true", help="draw what results/ holds, and stop")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.output)
        return
    torch.autograd.set_multithreading_enabled(False)
    rows = []
    for shape in SHAPES:
        for tokens in TOKENS:
            rows.append(measure(*shape, tokens))
            graph = {name: round(each["ratio"], 2) for name, each in rows[-1]["steps"].items()}
            eager = {name: round(ratio, 2) for name, ratio in rows[-1]["eager"].items()}
            milliseconds = round(rows[-1]["steps"]["linear"]["milliseconds"], 3)
            print(*shape, tokens, milliseconds, graph, eager, flush=True)
            torch.cuda.empty_cache()
    harness.write("fold", rows, arguments.output)


if __name__ == "__main__":
    main()
