"""One linear layer, forward and backward: POET-X against the layers that it replaces or competes with.

    python benchmarks/bench_layer.py [--output FOLDER]

The backward pass of all contestants runs in the thread that called it. PyTorch's default is a thread of its own, which
takes twice as long on the virtual machine that this was measured on, whatever runs in it: `..._two_threads` has that
default, and `..._graph` what is left where no host holds the GPU up, the same steps replayed from CUDA graphs.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from torch import Tensor, nn

from hf_poetx import PoetXConfig, get_poetx_model

SHAPES = [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)]
BLOCK, TOKENS = 256, 2048


def contestants(in_features: int, out_features: int) -> dict[str, nn.Module]:
    """Layers by name, all on the GPU in bf16, with adapters in the middle of training rather than at their start."""

    def base() -> nn.Sequential:
        return nn.Sequential(nn.Linear(in_features, out_features, bias=False, device="cuda", dtype=torch.bfloat16))

    def poetx(mode: str, group: int) -> nn.Module:
        config = PoetXConfig(block=BLOCK, memory_mode=mode, permutation_group=group, target_modules=["0"])
        return get_poetx_model(base(), config)

    def peft(config) -> nn.Module:
        return get_peft_model(base(), config)

    layers = {"linear": base()[0], "linear_frozen": base()[0].requires_grad_(False)}
    wrapped = {
        "poetx_fast": poetx("fast", 32),
        "poetx_mem": poetx("mem", 32),
        "poetx_fast_group16": poetx("fast", 16),
        "poetx_fast_group1": poetx("fast", 1),
        "poetx_mem_group1": poetx("mem", 1),
        "lora_r64": peft(LoraConfig(r=64, target_modules=["0"])),
        "oft": peft(OFTConfig(r=0, oft_block_size=BLOCK, target_modules=["0"])),
    }
    layers |= {name: model.base_model.model[0] for name, model in wrapped.items()}
    for name, layer in layers.items():
        for parameter in layer.parameters():
            if parameter.requires_grad and name not in ("linear", "linear_frozen"):
                nn.init.normal_(parameter, std=0.01)
    return layers


def training_step(layer: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def step() -> None:
        layer(x).backward(gradient)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def with_two_threads(step: Callable[[], None]) -> Callable[[], None]:
    def in_default_mode() -> None:
        with torch.autograd.set_multithreading_enabled(True):
            step()

    return in_default_mode


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of activations kept for the backward pass, x included, each storage once, parameters and buffers not."""
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(size for pointer, size in saved.items() if pointer not in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.autograd.set_multithreading_enabled(False)
    results = []
    for in_features, out_features in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(TOKENS, in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(TOKENS, out_features, device="cuda", dtype=torch.bfloat16)
        layers = contestants(in_features, out_features)
        steps = {name: training_step(layer, x, gradient) for name, layer in layers.items()}
        variants = {"graph": harness.graph, "two_threads": with_two_threads}
        for variant, make in variants.items():
            steps |= {f"{name}_{variant}": make(steps[name]) for name in ("linear", "poetx_fast", "poetx_mem")}
        measured = harness.measure(steps, "linear")
        for variant in variants:
            for name in ("linear", "poetx_fast", "poetx_mem"):
                each, baseline = measured[f"{name}_{variant}"], measured[f"linear_{variant}"]
                each[f"ratio_to_linear_{variant}"] = each["milliseconds"] / baseline["milliseconds"]
        for name, layer in layers.items():
            measured[name]["saved_bytes"] = saved_bytes(layer, x)
        shape = {"in_features": in_features, "out_features": out_features, "tokens": TOKENS, "block": BLOCK}
        results.append(shape | {"dtype": "bfloat16", "layers": measured})
        print(f"{in_features} -> {out_features}")
        for name, each in measured.items():
            print(
                f"  {name:23} {each['milliseconds']:7.3f} ms  {each['ratio']:5.2f}x"
                f"  ({each['ratio_20']:.2f}-{each['ratio_80']:.2f})  peak {each['peak_bytes'] / 2**20:6.1f} MiB"
                f"  saved {each.get('saved_bytes', 0) / 2**20:6.1f} MiB"
            )
    harness.write("layer", results, arguments.output)


if __name__ == "__main__":
    main()
