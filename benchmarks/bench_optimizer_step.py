"""One optimizer step over the parameters of Llama-3.2-1B and Llama-8B: time, share of copy bandwidth, state, peak memory.

python benchmarks/bench_optimizer_step.py [--output FOLDER] [--models 1B 8B] [--plot]

bitsandbytes and torchao take part where they are installed. With --plot, only draws what results/ holds.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from torch import Tensor

import hf_flashoptim

# Vocabulary, width, width of keys and values, width between gate and down, layers, is the head tied.
MODELS = {"1B": (128256, 2048, 512, 8192, 16, True), "8B": (128256, 4096, 1024, 14336, 32, False)}
COPY_BYTES = 1 << 32
# Bytes a parameter that a step must read and write, states by the formats' definitions.
MOVED = {
    "flash_adamw_24": 12.25,
    "flash_adamw_32": 14.25,
    "flash_adamw_fp32": 16.25,
    "flash_adamw_24_fp32_moments": 24,
    "flash_lion_24": 10.125,
    "flash_sgdw_24": 10.125,
    "flashoptim_adamw_24": 12.25,
    "flashoptim_adamw_32": 14.25,
    "flashoptim_lion_24": 10.125,
    "flashoptim_sgdw_24": 10.125,
    "torch_adamw_fused_fp32": 28,
    "torch_adamw_fused_bf16": 14,
    "bitsandbytes_adamw8bit": 10,
    "torchao_adamw8bit": 10,
}
LARGE = ["flash_adamw_24", "flashoptim_adamw_24", "torch_adamw_fused_bf16", "flash_lion_24"]


def shapes(model: str) -> list[tuple[int, ...]]:
    """Shapes of all parameters of a model."""
    vocabulary, width, kv, between, layers, tied = MODELS[model]
    layer = [(width, width), (kv, width), (kv, width), (width, width)]
    layer += [(between, width), (between, width), (width, between), (width,), (width,)]
    return [(vocabulary, width)] * (1 if tied else 2) + layer * layers + [(width,)]


def makers() -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """Optimizers by name, of whatever is installed."""
    ours = hf_flashoptim
    made = {
        "flash_adamw_24": lambda p: ours.FlashAdamW(p, lr=1e-6),
        "flash_adamw_32": lambda p: ours.FlashAdamW(p, lr=1e-6, master_weight_bits=32),
        "flash_adamw_fp32": lambda p: ours.FlashAdamW(p, lr=1e-6),
        "flash_adamw_24_fp32_moments": lambda p: ours.FlashAdamW(p, lr=1e-6, quantize=False),
        "flash_lion_24": lambda p: ours.FlashLion(p, lr=1e-6),
        "flash_sgdw_24": lambda p: ours.FlashSGDW(p, lr=1e-6, momentum=0.9),
        "torch_adamw_fused_fp32": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
        "torch_adamw_fused_bf16": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
    }
    if importlib.util.find_spec("flashoptim"):
        import flashoptim

        made["flashoptim_adamw_24"] = lambda p: flashoptim.FlashAdamW(p, lr=1e-6)
        made["flashoptim_adamw_32"] = lambda p: flashoptim.FlashAdamW(p, lr=1e-6, master_weight_bits=32)
        made["flashoptim_lion_24"] = lambda p: flashoptim.FlashLion(p, lr=1e-6)
        made["flashoptim_sgdw_24"] = lambda p: flashoptim.FlashSGDW(p, lr=1e-6, momentum=0.9)
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        made["bitsandbytes_adamw8bit"] = lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-6)
    if importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        made["torchao_adamw8bit"] = lambda p: AdamW8bit(p, lr=1e-6)
    return made


def parameters(model: str, dtype: torch.dtype) -> list[Tensor]:
    """Parameters with gradients, which all optimizers of this dtype share."""
    made = []
    for shape in shapes(model):
        p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02)
        p.grad = torch.randn(shape, device="cuda", dtype=dtype) * 1e-3
        made.append(p)
    return made


def benchmark(model: str, names: list[str]) -> dict:
    """Results of one model, by optimizer."""
    made = {name: maker for name, maker in makers().items() if name in names}
    dtypes = {name: torch.float32 if name.endswith("fp32") else torch.bfloat16 for name in made}
    tensors = {dtype: parameters(model, dtype) for dtype in set(dtypes.values())}
    count = sum(p.numel() for p in next(iter(tensors.values())))
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    steps, state_bytes = {"copy": lambda: target.copy_(source)}, {}
    for name, maker in made.items():
        optimizer = maker(tensors[dtypes[name]])
        before = torch.cuda.memory_allocated()
        optimizer.step()
        state_bytes[name] = torch.cuda.memory_allocated() - before
        steps[name] = optimizer.step
    # Many calls in a row: the first of them waits for the host, which the others run behind.
    result = harness.measure(steps, "flash_adamw_24", rounds=10, seconds=0.1 if model == "1B" else 0.5)
    copied = 2 * COPY_BYTES / result["copy"]["milliseconds"]
    for name in made:
        row = result[name]
        row["state_bytes_per_parameter"] = state_bytes[name] / count
        row["moved_bytes_per_parameter"] = MOVED[name]
        row["gigabytes_per_second"] = MOVED[name] * count / row["milliseconds"] / 1e6
        row["share_of_copy"] = MOVED[name] * count / row["milliseconds"] / copied
    result["copy"]["gigabytes_per_second"] = copied / 1e6
    host = host_milliseconds(steps["flash_adamw_24"])
    return {"parameters": count, "tensors": len(shapes(model)), "host_milliseconds": host, "optimizers": result}


def host_milliseconds(step: Callable[[], object], calls: int = 20) -> float:
    """Time that a step takes of the host while the GPU works."""
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    return sorted(times)[calls // 2]


def microseconds_per_parameter(tensors: list[tuple[int, ...]], calls: int = 200) -> float:
    """Time that gradient release takes of the host for each of some small parameters that it steps together."""
    params = [torch.nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) for shape in tensors]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = hf_flashoptim.FlashAdamW(params)
    group = optimizer.param_groups[0]
    return host_milliseconds(lambda: optimizer.step_params(params, group), calls) * 1e3 / len(params)


def plot(folder: Path) -> None:
    """Draw the share of copy bandwidth and the time of every optimizer on the smaller model."""
    import matplotlib.pyplot as plt

    results = json.loads((folder / "optimizer_step.json").read_text())["results"]
    rows = {name: row for name, row in results["1B"]["optimizers"].items() if name != "copy"}
    names = sorted(rows, key=lambda name: rows[name]["milliseconds"], reverse=True)
    colors = ["tab:blue" if name.startswith("flash_") else "tab:gray" for name in names]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.35 * len(names) + 1.2), sharey=True)
    axes[0].barh(names, [rows[name]["milliseconds"] for name in names], color=colors)
    axes[0].set_xlabel("ms a step, parameters of Llama-3.2-1B")
    axes[1].barh(names, [100 * rows[name]["share_of_copy"] for name in names], color=colors)
    axes[1].set_xlabel("bandwidth, % of a device copy")
    axes[1].axvline(100, color="black", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(folder / "optimizer_step.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.output)
        return
    layer = [(64, 64)] * 7 + [(64,)] * 2
    results = {
        "single_parameter_host_microseconds": microseconds_per_parameter(layer[:1]),
        "layer_host_microseconds_per_parameter": microseconds_per_parameter(layer),
    }
    for model in arguments.models:
        results[model] = benchmark(model, list(MOVED) if model == "1B" else LARGE)
        harness.write("optimizer_step", results, arguments.output)
        for name, row in results[model]["optimizers"].items():
            share = f"{row['share_of_copy']:7.1%}" if "share_of_copy" in row else ""
            print(f"{model} {name:30s} {row['milliseconds']:8.3f} ms {row['ratio']:6.2f}x {share} {row['peak_bytes']}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
