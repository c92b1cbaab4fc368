"""The article's comparisons: permutation by index, batched block products, input-centric against weight-centric.

    python benchmarks/bench_rotate.py [--output FOLDER]

All in bf16 with blocks of 256 and 2048 tokens; permutations and block products are replayed from CUDA graphs.
"""

import argparse
from pathlib import Path

import harness
import torch
from torch import Tensor

from hf_poetx.kernels.rotate import rotate, with_contiguous_columns, with_contiguous_rows
from hf_poetx.ops.poetx_linear import poetx_linear
from hf_poetx.ops.rotation import Rotation
from hf_poetx.ops.skew import num_entries
from hf_poetx.rotation import draw_permutation

BLOCK, TOKENS = 256, 2048


def rotation_of(width: int, group: int) -> Rotation:
    entries = (0.01 * torch.randn(width // BLOCK, num_entries(BLOCK), device="cuda")).requires_grad_()
    return Rotation(entries, None, draw_permutation(width, group, 0, "bench", 0).cuda(), group)


def permutation(width: int) -> dict:
    """A permutation of single columns: by index, by the kernels' way through column-major order, as a matrix."""
    x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
    index = torch.randperm(width, device="cuda")
    matrix = torch.eye(width, device="cuda", dtype=torch.bfloat16)[:, index]
    return {
        "dense_matrix": lambda: x @ matrix,
        "index": lambda: x.index_select(1, index),
        "columns": lambda: with_contiguous_rows(with_contiguous_columns(x).t().index_select(0, index).t()),
    }


def block_product(width: int) -> dict:
    """A rotation as one batched product with both permutations against the explicit block-diagonal matrix."""
    x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
    calls = {}
    for group in (32, 16, 1):
        rotation = rotation_of(width, group)
        blocks, _ = rotation.blocks(x.dtype)
        arguments = (blocks.detach(), None, rotation.permutation, group, False, None)
        calls[f"blocks_group{group}"] = lambda arguments=arguments: rotate(x, *arguments)
    dense = torch.block_diag(*blocks.detach())
    return {"dense_matrix": lambda: x @ dense, "bmm": lambda: bmm(x, blocks.detach())} | calls


def bmm(x: Tensor, blocks: Tensor) -> Tensor:
    """The product alone, without permutations."""
    return torch.bmm(x.unflatten(1, (-1, BLOCK)).transpose(0, 1), blocks).transpose(0, 1)


def layer(in_features: int, out_features: int) -> dict:
    """Forward and backward pass: activations rotated, against a rotated copy of the weight for every pass."""
    x = torch.randn(TOKENS, in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(TOKENS, out_features, device="cuda", dtype=torch.bfloat16)
    sides = [rotation_of(width, 32) for width in (in_features, out_features)]

    def clear() -> None:
        x.grad = sides[0].entries.grad = sides[1].entries.grad = None

    def input_centric(mode: str) -> None:
        poetx_linear(x, weight, None, *sides, mode).backward(gradient)
        clear()

    def weight_centric() -> None:
        rotated = sides[0].apply(weight, transpose=True)
        rotated = sides[1].apply(rotated.t().contiguous()).t()
        torch.nn.functional.linear(x, rotated).backward(gradient)
        clear()

    return {
        "weight_centric": weight_centric,
        "input_centric_fast": lambda: input_centric("fast"),
        "input_centric_mem": lambda: input_centric("mem"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.autograd.set_multithreading_enabled(False)  # as in bench_layer.py
    cases = [("permutation", permutation, (4096,)), ("permutation", permutation, (14336,))]
    cases += [("block_product", block_product, (4096,)), ("block_product", block_product, (14336,))]
    cases += [("layer", layer, (4096, 4096)), ("layer", layer, (4096, 14336))]
    results = []
    for name, make, widths in cases:
        calls = make(*widths)
        if name != "layer":
            calls = {key: harness.graph(call) for key, call in calls.items()}
        measured = harness.measure(calls, next(iter(calls)))
        results.append({"comparison": name, "widths": widths, "tokens": TOKENS, "block": BLOCK, "calls": measured})
        times = "  ".join(f"{key} {each['milliseconds'] * 1e3:.1f} us" for key, each in measured.items())
        print(f"{name} {widths}: {times}", flush=True)
    harness.write("rotate", results, arguments.output)


if __name__ == "__main__":
    main()
