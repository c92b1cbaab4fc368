"""Pretrain a 60M-parameter Llama on one GPU under a plain Trainer: POET-X, FlashAdamW and AdamW at equal tokens.

    python benchmarks/bench_pretraining_60m.py --corpus corpus.jsonl.xz --prepare tokens.pt
    python benchmarks/bench_pretraining_60m.py --tokens tokens.pt --runs adamw=1e-3 flash_adamw=1e-3 poetx=4e-3
    python benchmarks/bench_pretraining_60m.py --tokens tokens.pt --runs adamw=1e-3 poetx=4e-3 --compile reduce-overhead
    python benchmarks/bench_pretraining_60m.py --tokens tokens.pt --runs poetx=1e-2:0.125
    python benchmarks/bench_pretraining_60m.py --plot

The corpus is JSON lines, `{"source": ..., "text": ...}`; documents are shuffled, and held out by source. AdamW trains
fp32 weights under bf16 autocast, as is usual; FlashAdamW bf16 weights with 24-bit masters; POET-X (fast, block 256, a
merge every 100 steps) bf16 weights with FlashAdamW on everything that it trains, from rows of W normalized or, as
`poetx_keep`, left as they are. With --compile, TrainingArguments(torch_compile=True, torch_compile_mode=MODE).
A run is a method and its learning rate, for POET-X also its `poet_scale` (0.5 where none is given). Runs are added to
those that the output folder holds.
"""

import argparse
import gc
import json
import lzma
import random
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_flashoptim  # noqa: F401, registers optim="flash_adamw"
from hf_poetx import PoetXConfig, get_poetx_model

VOCABULARY, SEQUENCE, BATCH = 32000, 512, 64
TRAINING_TOKENS, HELD_OUT_TOKENS = 16 << 20, 1 << 16
MERGE_INTERVAL = 100
POETX_INIT = {"poetx": "normalize", "poetx_keep": "keep"}


def prepare(corpus: Path, target: Path) -> None:
    """Train a tokenizer on the corpus and write training and held-out tokens, uint16 ``[sequences, 512]``."""
    with lzma.open(corpus, "rt") as lines:
        documents = [json.loads(line) for line in lines]
    random.Random(0).shuffle(documents)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator((d["text"] for d in documents[::4]), trainer)
    held_out, training, count = defaultdict(list), [], 0
    for document in documents:
        own = held_out[document["source"]]
        if len(own) >= HELD_OUT_TOKENS and count >= TRAINING_TOKENS:
            continue
        ids = [0, *tokenizer.encode(document["text"]).ids]
        if len(own) < HELD_OUT_TOKENS:
            own.extend(ids)
        else:
            training.append(torch.tensor(ids, dtype=torch.int32))
            count += len(ids)
    splits = {source: rows(torch.tensor(ids[:HELD_OUT_TOKENS])) for source, ids in held_out.items()}
    torch.save({"train": rows(torch.cat(training)[:TRAINING_TOKENS]), "held_out": splits}, target)


def rows(tokens: Tensor) -> Tensor:
    return tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE).to(torch.uint16)


def llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype).cuda()


class Recorder(TrainerCallback):
    """Losses by step, and the time and peak memory of the steps behind a warm-up of 20."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.start = self.seconds = 0.0
        self.steps = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses.append((state.global_step, round(float(logs["loss"]), 4)))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 20:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = time.perf_counter()
        if state.global_step == state.max_steps:
            torch.cuda.synchronize()
            self.seconds, self.steps = time.perf_counter() - self.start, state.max_steps - 20


def dataset(tokens: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens.to(torch.int64)]


@torch.no_grad()
def held_out_losses(model: nn.Module, splits: dict[str, Tensor]) -> dict[str, float]:
    """Mean loss in nats a token, by source."""
    model.eval()
    losses = {}
    for source, tokens in splits.items():
        parts = tokens.to(torch.int64).cuda().split(BATCH)
        with torch.autocast("cuda", torch.bfloat16):
            sums = [model(input_ids=part, labels=part).loss.item() * len(part) for part in parts]
        losses[source] = round(sum(sums) / len(tokens), 4)
    return losses


def settings_of(record: dict) -> tuple:
    """What tells one run from another."""
    return record["method"], record["learning_rate"], record.get("poet_scale", 0.5), record["compiled"]


def run(method: str, rate: float, poet_scale: float, compiled: str | None, tokens: dict) -> dict:
    """Train one model; returns its record."""
    own = {"method": method, "learning_rate": rate, "compiled": compiled}
    model = llama(torch.float32 if method == "adamw" else torch.bfloat16)
    if method in POETX_INIT:
        own["poet_scale"] = poet_scale
        settings = {"block": 256, "memory_mode": "fast", "merge_interval": MERGE_INTERVAL, "poet_scale": poet_scale}
        model = get_poetx_model(model, PoetXConfig(init=POETX_INIT[method], train_rest=True, **settings))
    recorder = Recorder()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            optim="adamw_torch_fused" if method == "adamw" else "flash_adamw",
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            weight_decay=0.01,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            bf16=method == "adamw",
            torch_compile=compiled is not None,
            torch_compile_mode=compiled,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=dataset(tokens["train"]), callbacks=[recorder])
        try:
            trainer.train()
        except ValueError as error:  # POET-X refuses to merge what is not finite
            return own | {"diverged": str(error), "losses": recorder.losses}
    losses = held_out_losses(model, tokens["held_out"])
    return own | {
        "steps": recorder.steps + 20,
        "tokens": tokens["train"].numel(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "held_out_loss": round(sum(losses.values()) / len(losses), 4),
        "held_out_losses": losses,
        "tokens_per_second": round(recorder.steps * BATCH * SEQUENCE / recorder.seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "losses": recorder.losses,
        "merges": list(range(MERGE_INTERVAL, recorder.steps + 21, MERGE_INTERVAL)) if method in POETX_INIT else [],
    }


def plot(folder: Path) -> None:
    """Training loss of each method at its best rate, POET-X's merges marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = json.loads((folder / "pretraining_60m.json").read_text())["results"]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for method in dict.fromkeys(record["method"] for record in records):
        finished = [r for r in records if r["method"] == method and "held_out_loss" in r and not r["compiled"]]
        best = min(finished, key=lambda r: r["held_out_loss"])
        steps, losses = zip(*best["losses"], strict=True)
        scale = best.get("poet_scale", 0.5)
        rate = f"rate {best['learning_rate']:g}" + (f", poet_scale {scale:g}" if scale != 0.5 else "")
        label = f"{method}, {rate}: {best['held_out_loss']:.3f} held out"
        (line,) = axis.plot(steps, losses, label=label)
        for merge in best["merges"]:
            axis.axvline(merge, color=line.get_color(), linewidth=0.5, linestyle=":")
    axis.set(xlabel="step", ylabel="training loss (nats a token)", ylim=(None, 8))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(folder / "pretraining_60m.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="JSON lines, xz-compressed")
    parser.add_argument("--prepare", type=Path, help="write the corpus' tokens here, and stop")
    parser.add_argument("--tokens", type=Path, help="what --prepare wrote")
    parser.add_argument("--runs", nargs="+", default=["adamw=1e-3", "flash_adamw=1e-3", "poetx=4e-3"])
    parser.add_argument("--compile", metavar="MODE", help="compile the model: default or reduce-overhead")
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--plot", action="store_true", help="draw what results/ holds, and stop")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.corpus, arguments.prepare)
    elif arguments.plot:
        plot(arguments.output)
    else:
        tokens, path = torch.load(arguments.tokens), arguments.output / "pretraining_60m.json"
        records = json.loads(path.read_text())["results"] if path.exists() else []
        for name in arguments.runs:
            method, _, rates = name.partition("=")
            rate, _, poet_scale = rates.partition(":")
            own = (method, float(rate), float(poet_scale or 0.5), arguments.compile)
            records = [r for r in records if settings_of(r) != own]
            records.append(run(*own, tokens) | {"commit": harness.environment()["commit"]})
            shown = {k: v for k, v in records[-1].items() if k not in ("losses", "held_out_losses")}
            print(shown, flush=True)
            harness.write("pretraining_60m", records, arguments.output)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
