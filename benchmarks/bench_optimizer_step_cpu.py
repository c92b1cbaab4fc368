"""Time and temporary memory of an optimizer step on the CPU, as ratios to torch's fp32 AdamW on the same parameters.

    python benchmarks/bench_optimizer_step_cpu.py --output benchmarks/results/optimizer_step_cpu.json

Baseline and candidate alternate in one process. Temporary memory is the highest resident set during a step above that
before it, read in a process of its own for each candidate.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hf_flashoptim import FlashAdamW, FlashLion, FlashOptimizer, FlashSGDW

# The matrices and norms of three layers of width 1024, and a vocabulary of 4096: 42 million parameters.
LAYER = [(1024, 1024)] * 4 + [(2816, 1024)] * 2 + [(1024, 2816)] + [(1024,)] * 2
SHAPES = LAYER * 3 + [(4096, 1024), (1024,)]
ONE_TENSOR = [(8192, 4096)]
CANDIDATES: dict[str, tuple[type[FlashOptimizer], torch.dtype, dict[str, object]]] = {
    "FlashAdamW bf16 24-bit": (FlashAdamW, torch.bfloat16, {}),
    "FlashAdamW bf16 32-bit": (FlashAdamW, torch.bfloat16, {"master_weight_bits": 32}),
    "FlashAdamW fp32": (FlashAdamW, torch.float32, {}),
    "FlashLion bf16 24-bit": (FlashLion, torch.bfloat16, {}),
    "FlashSGDW bf16 24-bit": (FlashSGDW, torch.bfloat16, {"momentum": 0.9}),
}


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Random parameters with random gradients."""
    made = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape).mul(0.02).to(dtype))
        p.grad = torch.randn(shape).mul(1e-3).to(dtype)
        made.append(p)
    return made


def stepper(name: str, shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """The step of a candidate, or of the baseline, that has made its first one."""
    if name == "baseline":
        step = torch.optim.AdamW(parameters(shapes, torch.float32), lr=1e-3, foreach=True).step
    else:
        cls, dtype, options = CANDIDATES[name]
        step = cls(parameters(shapes, dtype), lr=1e-3, **options).step
    step()
    return step


def time_of(step: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def compare(name: str, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Times of a candidate and of the baseline in turns, and the median and 20-80% range of their ratio."""
    ours, baseline = stepper(name, shapes), stepper("baseline", shapes)
    pairs = [(time_of(ours), time_of(baseline)) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ms": round(statistics.median(a for a, _ in pairs), 2),
        "baseline_ms": round(statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_20": round(ratios[rounds // 5], 3),
        "ratio_80": round(ratios[-1 - rounds // 5], 3),
    }


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def temporary_memory(name: str) -> float:
    """MiB that a step of one tensor of 2^25 elements needs on top of everything that stays."""
    step = stepper(name, ONE_TENSOR)
    before, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            time.sleep(2e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return max(0, highest - before) / 2**20


def in_its_own_process(name: str) -> float:
    """``temporary_memory`` where nothing has been allocated and freed before."""
    command = [sys.executable, __file__, "--memory-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def processor() -> str:
    """Name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-of", choices=CANDIDATES)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(temporary_memory(options.memory_of))
        return
    results = {}
    for name in CANDIDATES:
        results[name] = {
            **compare(name, SHAPES, options.rounds),
            "temporary_mib": round(in_its_own_process(name), 1),
        }
        print(f"{name:24} {results[name]}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    record = {
        "what": "one optimizer step on the CPU; baseline torch.optim.AdamW(foreach=True), fp32, same parameters",
        "parameters": sum(torch.Size(shape).numel() for shape in SHAPES),
        "cpu": processor(),
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "command": "python benchmarks/bench_optimizer_step_cpu.py --output benchmarks/results/optimizer_step_cpu.json",
        "rounds": options.rounds,
        "results": results,
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
