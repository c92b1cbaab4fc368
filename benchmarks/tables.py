"""The tables of README.md, made from the committed results, so that no figure stands there that was not measured.

python benchmarks/tables.py          # writes them into README.md
python benchmarks/tables.py --check  # exits with 1 if README.md says anything else
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

from hf_poetx.ops.fold import folding_pays

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- table: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def demo() -> str:
    rows = {name: row for name, row in load("demo").items() if isinstance(row, dict)}
    return table(
        ("", "POET-X + flash_adamw", "AdamW"), ((name, row["poetx"], row["adamw"]) for name, row in rows.items())
    )


NAMES = {
    "flash_adamw_24": "FlashAdamW, 24-bit master",
    "flash_adamw_32": "FlashAdamW, 32-bit master",
    "flash_adamw_fp32": "FlashAdamW, fp32 weights",
    "flash_adamw_24_fp32_moments": "FlashAdamW, moments not quantized",
    "flash_lion_24": "FlashLion",
    "flash_sgdw_24": "FlashSGDW",
    "flashoptim_adamw_24": "flashoptim 0.1.4 FlashAdamW, 24-bit",
    "flashoptim_lion_24": "flashoptim 0.1.4 FlashLion",
    "torch_adamw_fused_fp32": "torch AdamW fused, fp32",
    "torch_adamw_fused_bf16": "torch AdamW fused, bf16, no master",
}


def optimizer_step() -> str:
    measured = load("optimizer_step")["results"]["1B"]["optimizers"]
    return table(
        ("optimizer", "ms", "against ours", "state, bytes a parameter", "share of copy bandwidth"),
        (
            (
                label,
                f"{measured[name]['milliseconds']:.2f}",
                f"{measured[name]['ratio']:.2f}x",
                f"{measured[name]['state_bytes_per_parameter']:.2f}",
                f"{measured[name]['share_of_copy']:.0%}",
            )
            for name, label in NAMES.items()
            if name in measured
        ),
    )


def full_finetune() -> str:
    labels = {
        "adamw_fp32_master": "AdamW, fp32 master weights",
        "adamw_bf16": "AdamW, bf16 without master",
        "flash_adamw": "FlashAdamW",
        "flash_adamw_release": "FlashAdamW, gradient release",
    }
    methods = load("full_finetune")["results"]["methods"]
    return table(
        ("Llama-8B, batch 1, 1024 tokens", "peak GiB", "ms a step", "bytes a parameter with gradients"),
        (
            (
                label,
                f"{methods[name]['peak_gibibytes']:.1f}",
                f"{methods[name]['milliseconds']:.0f}",
                f"{methods[name]['with_gradients_bytes_per_parameter']:.2f}",
            )
            for name, label in labels.items()
            if name in methods
        ),
    )


def layer() -> str:
    labels = {
        "linear": "nn.Linear, trained",
        "linear_frozen": "nn.Linear, frozen",
        "poetx_fast": "POET-X fast",
        "poetx_mem": "POET-X mem",
        "lora_r64": "PEFT LoRA r64",
        "oft": "PEFT OFT",
    }
    shapes = load("layer")["results"]
    header = ["layer", *(f"{shape['in_features']} to {shape['out_features']}" for shape in shapes)]
    rows = []
    for name, label in labels.items():
        cells = [shape["layers"][name] for shape in shapes]
        rows.append([label, *(f"{cell['milliseconds']:.2f} ms ({cell['ratio']:.2f}x)" for cell in cells)])
    return table(header, rows)


MODEL_METHODS = {
    "adamw_bf16": "AdamW, bf16 without master",
    "flash_adamw": "FlashAdamW",
    "lora_r64": "PEFT LoRA r64, AdamW",
    "lora_r64_bf16": "PEFT LoRA r64 with bf16 adapters, AdamW",
    "poetx_fast": "POET-X fast, FlashAdamW, embeddings and head trained",
    "poetx_mem": "POET-X mem, the same",
    "poetx_fast_release": "POET-X fast, the same, gradient release",
    "poetx_mem_release": "POET-X mem, the same, gradient release",
    "poetx_fast_frozen_rest": "POET-X fast, embeddings and head frozen",
    "poetx_mem_frozen_rest": "POET-X mem, embeddings and head frozen",
}


def model() -> str:
    measured = {
        (row["model"], row["method"]): (f"{row['milliseconds']:.0f}", f"{row['peak_gib']:.1f}")
        for row in load("model")["results"]
        if row["backward_threads"] == 1
        and not row.get("compiled")
        and (row["batch"], row["sequence"]) == (1, 1024)
        and "milliseconds" in row
    }
    rows = (
        (label, *measured.get(("8B", name), ("-", "-")), *measured.get(("13B", name), ("-", "-")))
        for name, label in MODEL_METHODS.items()
        if any((size, name) in measured for size in ("8B", "13B"))
    )
    return table(("batch 1, 1024 tokens", "8B, ms a step", "peak GiB", "13B, ms a step", "peak GiB"), rows)


def model_compiled() -> str:
    """Of the 8B model; the eager baseline stands in the table above."""
    rows = (row for row in load("model")["results"] if row.get("compiled") and row["model"] == "8B")
    header = ("`torch.compile` of Llama-8B", "mode", "ms a step", "against compiled AdamW", "against eager AdamW")
    return table(
        (*header, "peak GiB reserved", "seconds until the first step"),
        (
            (
                MODEL_METHODS[row["method"]],
                row["compiled"],
                f"{row['milliseconds']:.0f}",
                f"{row['ratio']:.2f}x",
                f"{row['ratio_to_eager']:.2f}x",
                f"{row['peak_reserved_gib']:.1f}",
                f"{row['first_step_seconds']:.0f}",
            )
            for row in rows
        ),
    )


def memory() -> str:
    peaks = {
        (row["method"], row["model"], row["sequence"]): f"{row['peak_gib']:.1f}"
        for row in load("memory")["results"]
        if "peak_gib" in row
    }
    columns = list(dict.fromkeys((size, tokens) for _, size, tokens in peaks))
    return table(
        ("peak GiB, batch 1", *(f"{size}, {tokens} tokens" for size, tokens in columns)),
        (
            (label, *(peaks.get((name, *column), "-") for column in columns))
            for name, label in MODEL_METHODS.items()
            if any(name == method for method, _, _ in peaks)
        ),
    )


def fold() -> str:
    measured = {
        (row["in_features"], row["out_features"], row["tokens"]): row["steps"] for row in load("fold")["results"]
    }
    shapes = list(dict.fromkeys(key[:2] for key in measured))
    rows = []
    for shape in shapes:
        cells = []
        for tokens in (2048, 8192, 32768):
            steps = measured[*shape, tokens]
            rotated = f"{steps['rotated']['ratio']:.2f}x"
            folds = folding_pays(tokens, *shape, 256, "cuda")
            cells.append(f"{steps['folded']['ratio']:.2f}x ({rotated})" if folds else rotated)
        rows.append((f"{shape[0]} to {shape[1]}", *cells))
    return table(("POET-X fast against nn.Linear", "2,048 tokens", "8,192 tokens", "32,768 tokens"), rows)


def pretraining_60m() -> str:
    labels = {
        "poetx": "POET-X + FlashAdamW, rows normalized",
        "poetx_keep": "POET-X + FlashAdamW, rows as they were",
        "flash_adamw": "FlashAdamW, bf16 weights",
        "adamw": "AdamW, autocast",
    }
    best: dict[tuple[str, str | None], dict] = {}
    for record in load("pretraining_60m")["results"]:
        key = record["method"], record["compiled"]
        if record.get("held_out_loss", inf) < best.get(key, {"held_out_loss": inf})["held_out_loss"]:
            best[key] = record
    order = sorted(best, key=lambda key: (key[1] or "", list(labels).index(key[0])))
    return table(
        (
            "a 60M Llama, 16.8M tokens",
            "`torch.compile`",
            "learning rate",
            "held-out loss",
            "tokens a second",
            "peak GiB",
        ),
        (
            (
                labels[method],
                compiled or "no",
                f"{best[method, compiled]['learning_rate']:g}" + scale_note(best[method, compiled]),
                f"{best[method, compiled]['held_out_loss']:.2f}",
                f"{best[method, compiled]['tokens_per_second']:,}",
                f"{best[method, compiled]['peak_gib']:.1f}",
            )
            for method, compiled in order
        ),
    )


def scale_note(record: dict[str, Any]) -> str:
    """A run's `poet_scale` where it is not the default."""
    scale = record.get("poet_scale", 0.5)
    return "" if scale == 0.5 else f", poet_scale {scale:g}"


def losses_by(study: str, field: str, label: str) -> str:
    """Held-out losses of a study's runs, by the field that it varies."""
    rows: dict[object, list[float]] = {}
    for record in load(f"pretraining_{study}")["records"]:
        rows.setdefault(record["run"][field], []).append(record["held_out_loss"])
    return table(
        (label, "held-out loss, mean of 3 seeds", "lowest", "highest"),
        ((name, f"{statistics.mean(v):.3f}", f"{min(v):.3f}", f"{max(v):.3f}") for name, v in rows.items()),
    )


def permutation_group() -> str:
    return losses_by("permutation_group", "permutation_group", "columns moved together")


def block() -> str:
    rows: dict[int, list[dict[str, Any]]] = {}
    for record in load("pretraining_block")["records"]:
        rows.setdefault(record["run"]["block"], []).append(record)
    return table(
        ("block", "held-out loss, mean of 3 seeds", "trained parameters", "processor seconds"),
        (
            (
                size,
                f"{statistics.mean(record['held_out_loss'] for record in records):.3f}",
                f"{records[0]['trained_parameters']:,}",
                f"{statistics.median(record['seconds'] for record in records):.0f}",
            )
            for size, records in rows.items()
        ),
    )


def interval() -> str:
    return losses_by("interval", "merge_interval", "steps between merges (0: none)")


def init() -> str:
    return losses_by("init", "init", "init")


def learning_rate() -> str:
    return losses_by_rate("learning_rate", "block")


def poet_scale() -> str:
    return losses_by_rate("poet_scale", "poet_scale")


def losses_by_rate(study: str, field: str) -> str:
    """Held-out losses of a study of one seed: a row for each value of a field, a column for each learning rate."""
    losses = {
        (record["run"][field], record["run"]["learning_rate"]): record["held_out_loss"]
        for record in load(f"pretraining_{study}")["records"]
    }
    values, rates = (list(dict.fromkeys(column)) for column in zip(*losses, strict=True))
    shown = {key: "diverged" if loss is None else f"{loss:.3f}" for key, loss in losses.items()}
    rows = ((value, *(shown[value, rate] for rate in rates)) for value in values)
    return table((field, *(f"rate {rate:g}" for rate in rates)), rows)


def methods() -> str:
    labels = {
        "poetx": "POET-X, block 32, with AdamW",
        "adamw": "AdamW",
        "lora": "LoRA r16, all else trained",
        "adamw8bit": "bitsandbytes AdamW, 8 bits",
        "adafactor": "Adafactor",
        "galore": "GaLore, rank 32",
    }
    records = load("pretraining_methods")["records"]
    rows = []
    for name, label in labels.items():
        own = [record for record in records if record["run"]["method"] == name and "diverged" not in record]
        rate = min(own, key=lambda record: record["held_out_loss"])["run"]["learning_rate"]
        losses = [record["held_out_loss"] for record in own if record["run"]["learning_rate"] == rate]
        figures = (f"{statistics.mean(losses):.3f}", f"{min(losses):.3f}", f"{max(losses):.3f}")
        rows.append((label, f"{rate:g}", *figures, f"{own[0]['trained_parameters']:,}"))
    header = ("method", "learning rate", "held-out loss, mean of 3 seeds", "lowest", "highest", "trained parameters")
    return table(header, rows)


FUNCTIONS = (
    demo, optimizer_step, full_finetune, layer, fold, model, model_compiled, memory, pretraining_60m, methods, block,
    interval, init, learning_rate, poet_scale, permutation_group,
)  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {function.__name__: function for function in FUNCTIONS}


def rendered(text: str) -> str:
    """The text with all its tables made anew."""
    return SECTION.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text()
    if arguments.check:
        sys.exit(text != rendered(text))
    README.write_text(rendered(text))


if __name__ == "__main__":
    main()
