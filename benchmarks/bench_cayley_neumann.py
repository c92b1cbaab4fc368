"""The Cayley-Neumann transform and its gradient: Triton kernels against the formula in PyTorch, eager and compiled.

    python benchmarks/bench_cayley_neumann.py [--output FOLDER]

Each contestant is replayed from a CUDA graph, so that kernels are compared and not the host's launches.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from torch import Tensor

from hf_poetx.kernels.cayley_neumann import transform_of
from hf_poetx.ops.cayley_neumann import cayley_neumann, cayley_neumann_backward
from hf_poetx.ops.skew import num_entries

# (blocks, size of a block): both sides of 4096 -> 4096 and of 4096 -> 14336, and two other sizes
SHAPES = [(32, 256), (72, 256), (64, 128), (16, 512)]


def formula(entries: Tensor) -> Tensor:
    return cayley_neumann._init_fn(entries, torch.bfloat16)


def formula_gradient(gradient: Tensor, entries: Tensor) -> Tensor:
    return cayley_neumann_backward._init_fn(gradient, entries, torch.bfloat16)


def contestants(num_blocks: int, block: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Calls by direction and name."""
    entries = 0.01 * torch.randn(num_blocks, num_entries(block), device="cuda")
    gradient = torch.randn(num_blocks, block, block, device="cuda")
    transform = transform_of((num_blocks,), block, entries.dtype, torch.bfloat16, entries.device)
    compiled, compiled_gradient = torch.compile(formula), torch.compile(formula_gradient)
    return {
        "forward": {
            "eager": lambda: formula(entries),
            "compiled": lambda: compiled(entries),
            "kernels": lambda: transform.blocks(transform.unpack(entries)),
        },
        "backward": {
            "eager": lambda: formula_gradient(gradient, entries),
            "compiled": lambda: compiled_gradient(gradient, entries),
            "kernels": lambda: transform.gradient(transform.unpack(entries), gradient, [entries]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # the formula may use TF32, as the kernels' operands are 16 bits
    results = []
    for num_blocks, block in SHAPES:
        torch.manual_seed(0)
        row = {"num_blocks": num_blocks, "block": block, "dtype": "bfloat16"}
        for direction, calls in contestants(num_blocks, block).items():
            row[direction] = harness.measure({name: harness.graph(call) for name, call in calls.items()}, "eager")
            times = "  ".join(f"{name} {each['milliseconds'] * 1e3:.1f} us" for name, each in row[direction].items())
            print(f"{num_blocks} blocks of {block}, {direction}: {times}", flush=True)
        results.append(row)
    harness.write("cayley_neumann", results, arguments.output)


if __name__ == "__main__":
    main()
