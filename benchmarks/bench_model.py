"""One training step of a whole Llama with random weights: time and peak memory of POET-X, LoRA and full training.

    python benchmarks/bench_model.py [--output FOLDER] [--rows PATTERN ...] [--sequence 1024]
    python benchmarks/bench_model.py --memory [--output FOLDER] [--rows PATTERN ...]
    python benchmarks/bench_model.py --plot [--output FOLDER]

Batch 1 (or what a row says), bf16, no gradient checkpointing. `--rows` takes patterns of names such as "8B/poetx_*" or
"8B/*/reduce-overhead"; `--list` prints all names. A file of results keeps the rows of other runs, on the same GPU with
the same versions; one with others is refused.

The models are too large to alternate in one process step by step: rows run one after the other, each next to the
baseline, AdamW, of its own kind from the same run, and the eager baseline twice, first and last, so that its two
figures show the drift. `ratio` is to the baseline of the same kind (a compiled row's to compiled AdamW), `ratio_to_eager`
to the eager one. Rows with "default" or "reduce-overhead" are compiled by `torch.compile(model, mode=...)`, as
`TrainingArguments(torch_compile=True)` does; `first_step_seconds` has the compiling in it. Graphs keep memory in pools
that `peak_gib` (allocated) does not count; `peak_reserved_gib` does.

The backward pass runs in the thread that called it (`backward_threads` 1); PyTorch's default is a thread of its own (2),
which takes twice as long for the same Python code on the virtual machine that this was measured on, so two methods are
run so too.

"lora_r64" has PEFT's default, adapters in fp32, for which every activation is cast to fp32 and kept so;
"lora_r64_bf16" has `autocast_adapter_dtype=False`, adapters in the dtype of the model. "poetx_..._release" steps in the
backward pass (`hf_flashoptim.enable_gradient_release`).

`--memory` measures peaks alone, of three models at three lengths, into memory.json; `--plot` draws them.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_flashoptim import FlashAdamW, enable_gradient_release
from hf_poetx import PoetXConfig, get_poetx_model

DEVICE = "cuda"
# Vocabulary, width, key and value heads, width between gate and down, layers, is the head tied to the embeddings.
MODELS = {
    "3B": (128256, 3072, 8, 8192, 28, True),
    "8B": (128256, 4096, 8, 14336, 32, False),
    "13B": (32000, 5120, 40, 13824, 40, False),
}
BASELINE = "adamw_bf16"
WARMUP_STEPS, STEPS = 3, 10
MEMORY_WARMUP_STEPS, MEMORY_STEPS = 2, 2
MEMORY_SEQUENCES = (512, 1024, 2048)


class Row(NamedTuple):
    """What is measured; rows that differ in the method alone are of one kind. `compiled` is a mode or False."""

    model: str
    method: str
    batch: int = 1
    compiled: str | bool = False
    backward_threads: int = 1

    @property
    def name(self) -> str:
        batch = f"/batch{self.batch}" if self.batch > 1 else ""
        threads = "/two_threads" if self.backward_threads > 1 else ""
        return f"{self.model}/{self.method}{batch}{f'/{self.compiled}' if self.compiled else ''}{threads}"

    @property
    def baselines(self) -> "tuple[Row, Row]":
        """The baseline of the same kind and the eager one."""
        same = self._replace(method=BASELINE)
        return same, same._replace(compiled=False)


def llama(name: str) -> nn.Module:
    vocabulary, width, kv_heads, between, layers, tied = MODELS[name]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=width // 128, num_key_value_heads=kv_heads, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)


def flash_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return FlashAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def flash_adamw_released(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = flash_adamw(model)
    enable_gradient_release(model, optimizer)
    return optimizer


def poetx(mode: str, train_rest: bool) -> Callable[[nn.Module], nn.Module]:
    # A config of its own for each model: wrapping writes the names of its layers into it.
    return lambda model: get_poetx_model(model, PoetXConfig(block=256, memory_mode=mode, train_rest=train_rest))


def lora(autocast_adapter_dtype: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        config = LoraConfig(r=64, lora_alpha=128, target_modules="all-linear")
        return get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)

    return wrap


METHODS = {
    BASELINE: (lambda model: model, torch_adamw),
    "flash_adamw": (lambda model: model, flash_adamw),
    "lora_r64": (lora(autocast_adapter_dtype=True), torch_adamw),
    "lora_r64_bf16": (lora(autocast_adapter_dtype=False), torch_adamw),
    "poetx_fast": (poetx("fast", True), flash_adamw),
    "poetx_mem": (poetx("mem", True), flash_adamw),
    "poetx_fast_release": (poetx("fast", True), flash_adamw_released),
    "poetx_mem_release": (poetx("mem", True), flash_adamw_released),
    "poetx_fast_frozen_rest": (poetx("fast", False), flash_adamw),
    "poetx_mem_frozen_rest": (poetx("mem", False), flash_adamw),
}
MODES = ("default", "reduce-overhead")
ROWS = [
    *(Row("8B", method) for method in METHODS),
    Row("8B", BASELINE, backward_threads=2),
    Row("8B", "poetx_fast", backward_threads=2),
    Row("8B", BASELINE, batch=4),
    Row("8B", "poetx_fast", batch=4),
    *(
        Row("8B", method, compiled=mode)
        for mode in MODES
        for method in (BASELINE, "poetx_fast", "poetx_mem", "poetx_mem_frozen_rest")
    ),
    *(Row("13B", name) for name in (BASELINE, "lora_r64", "lora_r64_bf16")),
    *(Row("13B", name) for name in ("poetx_mem", "poetx_mem_release", "poetx_mem_frozen_rest")),
]
MEMORY_METHODS = [method for method in METHODS if method != "flash_adamw" and not method.startswith("poetx_fast_")]
MEMORY_ROWS = [Row(model, method) for model in MODELS for method in MEMORY_METHODS]


def run(
    row: Row, sequence: int, model: nn.Module, optimizer: torch.optim.Optimizer, warmup: int, steps: int
) -> dict[str, Any]:
    """Milliseconds a step (median, 20% and 80% quantiles), seconds of the first one, and peak GiB of the steps."""
    tokens = torch.randint(MODELS[row.model][0], (warmup + steps, row.batch, sequence), device=DEVICE)
    times = []
    for step, batch in enumerate(tokens):
        if step == warmup:
            # So that what is reserved from here on is what steps need.
            torch.cuda.empty_cache()
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
        raise RuntimeError(f"{row.name}: the loss is {loss.item()}")
    low, median, high = torch.tensor(times[warmup:]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return {
        "milliseconds": median,
        "milliseconds_20": low,
        "milliseconds_80": high,
        "first_step_seconds": times[0] / 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def measure(row: Row, sequences: list[int], warmup: int, steps: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Figures at each length of one model with one optimizer; where it does not fit, that is the only figure."""
    torch.autograd.set_multithreading_enabled(row.backward_threads > 1)
    wrap, make_optimizer = METHODS[row.method]
    model = wrap(llama(row.model)).train()
    optimizer = make_optimizer(model)
    called = torch.compile(model, mode=row.compiled) if row.compiled else model
    figures: dict[str, Any] = {}
    for sequence in sorted(sequences):
        # What is too long for the memory leaves a step half done, and more is too long as well.
        if "out_of_memory" not in figures:
            try:
                figures = run(row, sequence, called, optimizer, warmup, steps)
            except torch.OutOfMemoryError:
                figures = {"out_of_memory": True}
        yield sequence, figures


def free() -> None:
    """Give back what a row held: models refer to themselves, and compiled ones are kept by the compiler."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


KEY = ("model", "method", "sequence", "batch", "compiled", "backward_threads")


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Each row's time by that of the baselines in the same run, where they are measured."""
    for row in rows:
        kind = {"method": BASELINE, **{name: row[name] for name in KEY if name != "method"}}
        for ratio, key in (("ratio", kind), ("ratio_to_eager", kind | {"compiled": False})):
            baselines = [
                each["milliseconds"]
                for each in rows
                if "milliseconds" in each and all(each[name] == value for name, value in key.items())
            ]
            if baselines and "milliseconds" in row:
                row[ratio] = row["milliseconds"] * len(baselines) / sum(baselines)


def with_baselines(selected: list[Row]) -> list[Row]:
    """The rows and their baselines in the order of ROWS, the eager baseline of each model at the end once more."""
    wanted = {*selected, *(baseline for row in selected for baseline in row.baselines)}
    order = []
    for model in MODELS:
        own = [row for row in ROWS if row.model == model and row in wanted]
        order += [*own, Row(model, BASELINE)] if len(own) > 1 and Row(model, BASELINE) in own else own
    return order


def measure_times(selected: list[Row], sequence: int, folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    earlier = harness.earlier_rows("model", folder)
    for row in with_baselines(selected):
        ((_, figures),) = measure(row, [sequence], WARMUP_STEPS, STEPS)
        rows.append({**row._asdict(), "sequence": sequence, **figures})
        free()
        show(row, sequence, figures)
        add_ratios(rows)
        harness.write_rows("model", rows, earlier, KEY, folder)


def measure_memory(selected: list[Row], sequences: list[int], folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    earlier = harness.earlier_rows("memory", folder)
    for row in selected:
        for sequence, figures in measure(row, sequences, MEMORY_WARMUP_STEPS, MEMORY_STEPS):
            # Two steps are too few for a time.
            figures = {name: value for name, value in figures.items() if not name.startswith(("milli", "first"))}
            rows.append(
                {"model": row.model, "method": row.method, "sequence": sequence, "batch": row.batch, **figures}
            )
            show(row, sequence, figures)
            harness.write_rows("memory", rows, earlier, KEY[:4], folder)
        free()


def show(row: Row, sequence: int, figures: dict[str, Any]) -> None:
    said = [f"{figures[name]:8.1f} {unit}" for name, unit in SHOWN.items() if name in figures]
    print(f"{row.name:40} {sequence:5} {'  '.join(said) or 'out of memory'}", flush=True)


SHOWN = {"milliseconds": "ms", "first_step_seconds": "s first", "peak_gib": "GiB", "peak_reserved_gib": "GiB reserved"}


def plot(folder: Path) -> None:
    """Draw memory.json: peak memory by length, a panel for each model."""
    import matplotlib.pyplot as plt

    rows = json.loads((folder / "memory.json").read_text())["results"]
    models = [name for name in MODELS if any(row["model"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(models), figsize=(4 * len(models), 3.6), squeeze=False, layout="constrained")
    for axis, model in zip(axes[0], models, strict=True):
        for index, method in enumerate(MEMORY_METHODS):
            mine = sorted(
                (row["sequence"], row["peak_gib"])
                for row in rows
                if (row["model"], row["method"]) == (model, method) and "peak_gib" in row
            )
            style = "-" if method.startswith("poetx") else "--"
            axis.plot(*zip(*mine, strict=True), style, marker="o", color=f"C{index}", label=method) if mine else None
        axis.set(title=f"Llama-{model}, batch 1", xlabel="tokens", ylabel="peak memory, GiB", ylim=(0, None))
        axis.set_xticks(sorted({row["sequence"] for row in rows}))
    axes[0][-1].legend(fontsize="x-small")
    figure.savefig(folder / "memory.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="of names; quote it")
    parser.add_argument("--sequence", type=int, nargs="+", help="tokens; 1024, or 512 1024 2048 with --memory")
    parser.add_argument("--memory", action="store_true", help="peak memory alone, of three models at three lengths")
    parser.add_argument("--plot", action="store_true", help="draw the memory.json that is there, and stop")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and stop")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.output)
        return
    rows = MEMORY_ROWS if arguments.memory else ROWS
    for pattern in arguments.rows:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            parser.error(f"--rows {pattern!r} matches none; --list prints their names")
    selected = [row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in arguments.rows)]
    if arguments.list:
        print(*(row.name for row in selected), sep="\n")
    elif arguments.memory:
        measure_memory(selected, arguments.sequence or list(MEMORY_SEQUENCES), arguments.output)
    else:
        for sequence in arguments.sequence or [1024]:
            measure_times(selected, sequence, arguments.output)


if __name__ == "__main__":
    main()
