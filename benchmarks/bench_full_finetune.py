"""One full fine-tuning step of a Llama-8B with random weights on one GPU: peak memory and time, by optimizer.

python benchmarks/bench_full_finetune.py [--output FOLDER] [--tokens 1024] [--plot]
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_flashoptim

CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
METHODS = ["adamw_bf16", "flash_adamw", "flash_adamw_release", "adamw_fp32_master"]


def model_with(dtype: torch.dtype) -> nn.Module:
    """A Llama-8B whose weights are random, made on the GPU."""
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="sdpa"))
    torch.set_default_dtype(torch.float32)
    return model.train()


def training_step(method: str, tokens: int) -> tuple[Callable[[], None], nn.Module]:
    """A step of a method, and its model."""
    model = model_with(torch.float32 if method == "adamw_fp32_master" else torch.bfloat16)
    if method.startswith("flash"):
        optimizer = hf_flashoptim.FlashAdamW(model.parameters(), lr=1e-6)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    released = method.endswith("release")
    if released:
        hf_flashoptim.enable_gradient_release(model, optimizer)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, tokens), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=method == "adamw_fp32_master"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if not released:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step, model


def measured(method: str, tokens: int, rounds: int = 3, steps: int = 5) -> dict:
    """Peak memory and time of a step; bytes a parameter of weights, states and the gradients held at once.

    Nothing waits for the GPU between the steps of a round, as in training; the median of the rounds counts.
    """
    step, model = training_step(method, tokens)
    count = sum(p.numel() for p in model.parameters())
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    gradients = 0 if method.endswith("release") else next(model.parameters()).element_size()
    return {
        "parameters": count,
        "milliseconds": sorted(times)[rounds // 2],
        "peak_gibibytes": torch.cuda.max_memory_allocated() / 2**30,
        "weights_and_states_bytes_per_parameter": kept / count,
        "with_gradients_bytes_per_parameter": kept / count + gradients,
    }


def plot(folder: Path) -> None:
    """Draw peak memory and time."""
    import matplotlib.pyplot as plt

    results = json.loads((folder / "full_finetune.json").read_text())["results"]["methods"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
    colors = ["tab:blue" if name.startswith("flash") else "tab:gray" for name in results]
    for axis, key, label in zip(
        axes, ("peak_gibibytes", "milliseconds"), ("peak memory, GiB", "ms a step"), strict=True
    ):
        axis.barh(list(results), [row[key] for row in results.values()], color=colors)
        axis.set_xlabel(f"{label}, Llama-8B")
    figure.tight_layout()
    figure.savefig(folder / "full_finetune.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.output)
        return
    methods = {}
    for method in METHODS:
        methods[method] = measured(method, arguments.tokens)
        print(method, methods[method], flush=True)
        harness.write("full_finetune", {"tokens": arguments.tokens, "methods": methods}, arguments.output)
        gc.collect()  # gradient release and its hooks refer to each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
