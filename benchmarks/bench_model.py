"""One training step of a whole Llama with random weights: time and peak memory of POET-X, LoRA and full training.

    python benchmarks/bench_model.py [--output FOLDER] [--models 8B 13B] [--sequence 1024]

Batch 1, bf16, no gradient checkpointing. The models are too large to alternate in one process step by step: methods
run one after the other and the baseline twice, first and last, so that its two figures show the drift. The backward
pass runs in the thread that called it (`backward_threads` 1); PyTorch's default is a thread of its own (2), which takes
twice as long for the same Python code on the virtual machine that this was measured on, so two methods are run so too.
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_flashoptim import FlashAdamW
from hf_poetx import PoetXConfig, get_poetx_model

# Vocabulary, width, key and value heads, width between gate and down, layers.
MODELS = {"8B": (128256, 4096, 8, 14336, 32), "13B": (32000, 5120, 40, 13824, 40)}
BASELINE = "adamw_bf16"
WARMUP_STEPS, STEPS = 3, 10


def llama(name: str) -> nn.Module:
    vocabulary, width, kv_heads, between, layers = MODELS[name]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=width // 128, num_key_value_heads=kv_heads, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)


def flash_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return FlashAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def poetx(mode: str, train_rest: bool) -> Callable[[nn.Module], nn.Module]:
    config = PoetXConfig(block=256, memory_mode=mode, train_rest=train_rest)
    return lambda model: get_poetx_model(model, config)


def lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=64, lora_alpha=128, target_modules="all-linear"))


METHODS = {
    BASELINE: (lambda model: model, torch_adamw),
    "flash_adamw": (lambda model: model, flash_adamw),
    "lora_r64": (lora, torch_adamw),
    "poetx_fast": (poetx("fast", True), flash_adamw),
    "poetx_mem": (poetx("mem", True), flash_adamw),
    "poetx_fast_frozen_rest": (poetx("fast", False), flash_adamw),
    "poetx_mem_frozen_rest": (poetx("mem", False), flash_adamw),
}
METHODS_13B = ["lora_r64", "poetx_mem", "poetx_mem_frozen_rest"]


def measure(name: str, method: str, sequence: int) -> dict[str, float]:
    """Milliseconds a step (median, 20% and 80% quantiles), peak GiB of the steps, and how many parameters train."""
    wrap, make_optimizer = METHODS[method]
    model = wrap(llama(name)).train()
    optimizer = make_optimizer(model)
    vocabulary = MODELS[name][0]
    tokens = torch.randint(vocabulary, (STEPS + WARMUP_STEPS, 1, sequence), device="cuda")
    times = []
    for step, batch in enumerate(tokens):
        if step == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    if not loss.isfinite():
        raise RuntimeError(f"{method}: the loss is {loss.item()}")
    low, median, high = torch.tensor(times[WARMUP_STEPS:]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return {
        "milliseconds": median,
        "milliseconds_20": low,
        "milliseconds_80": high,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", nargs="+", default=["8B", "13B"], choices=list(MODELS))
    parser.add_argument("--sequence", type=int, default=1024)
    arguments = parser.parse_args()
    results = []
    for name in arguments.models:
        # Full training of 13B does not fit on one card.
        order = [(method, 1) for method in ([*METHODS, BASELINE] if name == "8B" else METHODS_13B)]
        if name == "8B":
            order += [(BASELINE, 2), ("poetx_fast", 2)]
        rows = []
        for method, threads in order:
            torch.autograd.set_multithreading_enabled(threads > 1)
            rows.append({"model": name, "method": method, "sequence": arguments.sequence, "batch": 1})
            rows[-1] |= {"backward_threads": threads} | measure(name, method, arguments.sequence)
            gc.collect()
            torch.cuda.empty_cache()
            print(
                f"{name} {method:24} {threads} {rows[-1]['milliseconds']:7.1f} ms {rows[-1]['peak_gib']:6.1f} GiB",
                flush=True,
            )
            harness.write("model", results + rows, arguments.output)
        for row in rows:
            baselines = [
                each["milliseconds"]
                for each in rows
                if each["method"] == BASELINE and each["backward_threads"] == row["backward_threads"]
            ]
            if baselines:
                row["ratio"] = row["milliseconds"] * len(baselines) / sum(baselines)
        results += rows
    harness.write("model", results, arguments.output)


if __name__ == "__main__":
    main()
