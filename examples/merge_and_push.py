"""Merge an adapter into a plain checkpoint, check that it says the same, and publish it.

    python examples/merge_and_push.py outputs/finetune/adapter merged                       # merge and check
    python examples/merge_and_push.py outputs/finetune/adapter merged --push-to-hub user/name --private
    python examples/merge_and_push.py --smoke                                               # a tiny random model

`poetx merge` does the same from the command line, without the check, in little memory.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_flashoptim  # noqa: F401  # registers optim="flash_adamw"
from hf_poetx import CardFacts, PoetXConfig, get_poetx_model, merge_checkpoint, push_folder, write_card


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", nargs="?", help="folder, Trainer's checkpoint, or repository on the Hub")
    parser.add_argument("output", nargs="?", type=Path, help="folder for the merged model")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument("--push-to-hub", metavar="USER/NAME")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="train a tiny random model first, in a temporary folder")
    arguments = parser.parse_args()
    if not arguments.smoke and not (arguments.adapter and arguments.output):
        parser.error("name an adapter and an output folder, or use --smoke")
    return arguments


def train_tiny_adapter(folder: Path) -> str:
    """A few steps of POET-X on a random Llama and random tokens, with a merge on the way; the adapter's folder."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_poetx_model(base, PoetXConfig(block=16, merge_interval=3, task_type="CAUSAL_LM"))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 24))]
    arguments = TrainingArguments(
        str(folder / "training"), max_steps=5, optim="flash_adamw", learning_rate=1e-2, save_steps=5, report_to=[]
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return str(folder / "training/checkpoint-5")


@torch.no_grad()
def largest_difference(adapter: str, base: str, merged: Path) -> float:
    """Largest difference of a logit between adapter and merged model, relative to the largest logit."""
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    wrapped = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    ).eval()
    tokens = torch.randint(0, plain.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = wrapped(tokens).logits
    return ((plain(tokens).logits - expected).abs().max() / expected.abs().max()).item()


def run(arguments: argparse.Namespace) -> None:
    summary = merge_checkpoint(arguments.adapter, arguments.output, base=arguments.base)
    title = arguments.push_to_hub or arguments.output.name
    write_card(arguments.output, CardFacts.of_export(summary, title))
    print(f"{summary.num_parameters:,} parameters in {arguments.output}; merge error {summary.largest_error:.1e}")
    if summary.base is not None:
        difference = largest_difference(str(arguments.adapter), summary.base, arguments.output)
        print(f"adapter and merged model differ by {difference:.1e} of the largest logit")
        # The adapter's forward pass takes three products for one, each rounded: fp32 allows a few units of 1e-7 per layer.
        if summary.largest_error == 0 and difference > 1e-4:
            raise SystemExit("the merged model is not the adapter's; nothing was pushed")
    if arguments.push_to_hub:
        info = push_folder(arguments.output, arguments.push_to_hub, private=arguments.private or None)
        print(f"pushed: {info.commit_url}")


def main() -> None:
    arguments = parse_arguments()
    if not arguments.smoke:
        run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.adapter, arguments.output = train_tiny_adapter(Path(folder)), Path(folder) / "merged"
        run(arguments)


if __name__ == "__main__":
    main()
