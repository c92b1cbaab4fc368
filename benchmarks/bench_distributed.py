"""Several GPUs: POET-X under DDP in a plain Trainer, FlashAdamW under FSDP2 with checkpoints between numbers of ranks.

    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py ddp --method poetx
    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py ddp --method adamw
    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py fsdp2 --checkpoint FOLDER

Run the same commands with ``--nproc-per-node 1`` for one GPU, and ``fsdp2`` there with ``--seeds 0 1 2`` too: its losses
must differ from those of two GPUs by no more than seeds do. A run of ``fsdp2`` saves a distributed checkpoint in the
middle, and goes on from those that runs with other numbers of ranks have left in FOLDER. Every run adds its record to
`benchmarks/results/distributed.json`. Without GPUs it runs over gloo; ``--model tiny`` is for a try.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_flashoptim import FlashAdamW
from hf_poetx import PoetXConfig, get_poetx_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Vocabulary, width, heads, key and value heads, width between gate and down, layers, tokens a sequence.
MODELS = {"1B": (128256, 2048, 32, 8, 8192, 16, 1024), "tiny": (256, 64, 4, 2, 128, 2, 32)}
WARMUP_STEPS, MERGE_INTERVAL, MERGES = 10, 20, 3
FSDP2_STEPS = 40


def llama(name: str, seed: int = 0) -> nn.Module:
    vocabulary, width, heads, kv_heads, between, layers, _ = MODELS[name]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=between, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).to(DEVICE)


def sequences(name: str, count: int, seed: int = 0) -> Tensor:
    """Tokens ``[count, sequence]``, the same on all ranks: each follows from the one before, one in ten is drawn."""
    vocabulary, *_, length = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    follows = torch.rand(count, length, generator=generator) < 0.9
    for position in range(1, length):
        successor = (tokens[:, position - 1] * 31 + 7) % vocabulary
        tokens[:, position] = torch.where(follows[:, position], successor, tokens[:, position])
    return tokens


class Clock(TrainerCallback):
    """Seconds of the steps behind the warm-up."""

    seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (WARMUP_STEPS, state.max_steps):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds


def differing_tensors(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers that are not, bit for bit, those of rank 0."""
    names = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first = tensor.detach().clone()
        if dist.is_initialized():
            dist.broadcast(first, 0)
        if not torch.equal(first, tensor):
            names.append(name)
    return names


def ddp(arguments: argparse.Namespace) -> dict:
    """Tokens a second, the gradients that ranks exchange, and whether all ranks hold the same after several merges."""
    model = llama(arguments.model)
    if arguments.method == "poetx":
        settings = {"block": min(256, MODELS[arguments.model][1]), "merge_interval": MERGE_INTERVAL}
        model = get_poetx_model(model, PoetXConfig(memory_mode="fast", train_rest=True, **settings))
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    ranks, steps = world_size(), MERGE_INTERVAL * MERGES
    rows = sequences(arguments.model, steps * ranks * arguments.batch)
    clock = Clock()
    with TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=arguments.batch, learning_rate=1e-3,
            optim="flash_adamw" if arguments.method == "poetx" else "adamw_torch_fused", bf16=False,
            save_strategy="no", report_to="none", logging_steps=10, disable_tqdm=True, use_cpu=DEVICE == "cpu",
        )  # fmt: skip
        trainer = Trainer(
            model, training, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[clock]
        )
        trainer.train()
    tokens = (steps - WARMUP_STEPS) * ranks * arguments.batch * rows.shape[1]
    return {
        "method": arguments.method,
        "batch_per_rank": arguments.batch,
        "tokens_per_second": round(tokens / clock.seconds),
        # DDP reduces every gradient once a step, in its own dtype.
        "gradient_bytes_per_step": gradient_bytes,
        "merges": MERGES if arguments.method == "poetx" else 0,
        "tensors_that_differ_between_ranks": differing_tensors(model),
        "losses": [round(log["loss"], 4) for log in trainer.state.log_history if "loss" in log],
    }


class Fsdp2Training:
    """FlashAdamW on a model that is sharded over all ranks, each taking its part of every batch."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self.model = llama(arguments.model, seed)
        if dist.is_initialized():
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = FlashAdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.rows = sequences(arguments.model, FSDP2_STEPS * arguments.batch)
        self.batch = arguments.batch

    def steps(self, first: int, last: int) -> list[float]:
        """Train these steps; returns the mean loss of the ranks for each."""
        losses = []
        for step in range(first, last):
            batch = self.rows[step * self.batch : (step + 1) * self.batch]
            part = batch.chunk(world_size())[rank()].to(DEVICE)
            loss = self.model(input_ids=part, labels=part).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().float()
            if dist.is_initialized():
                dist.all_reduce(mean)
            losses.append(round(mean.item() / world_size(), 5))
        return losses

    def state(self) -> dict:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def fsdp2(arguments: argparse.Namespace, seed: int) -> dict:
    """Losses of a whole training, and of its second half from checkpoints that other numbers of ranks have written."""
    half, folder = FSDP2_STEPS // 2, arguments.checkpoint
    training = Fsdp2Training(arguments, seed)
    losses = training.steps(0, half)
    resumed = {}
    if folder and seed == arguments.seeds[0]:
        own = folder / f"ranks-{world_size()}"
        dcp.save(training.state(), checkpoint_id=own, no_dist=not dist.is_initialized())
    losses += training.steps(half, FSDP2_STEPS)
    del training
    for other in sorted(folder.glob("ranks-*")) if folder and seed == arguments.seeds[0] else ():
        training = Fsdp2Training(arguments, seed + 100)  # its own weights must not matter
        training.load(other)
        resumed[other.name] = training.steps(half, FSDP2_STEPS)
        del training
    return {"seed": seed, "global_batch": arguments.batch, "losses": losses, "losses_resumed_from": resumed}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def record(row: dict, folder: Path) -> None:
    """Add a record to those that the folder holds, in place of one of the same run."""
    if rank():
        return
    path = folder / "distributed.json"
    records = json.loads(path.read_text())["results"] if path.exists() else []
    identity = ("case", "model", "ranks", "method", "seed")
    records = [old for old in records if any(old.get(key) != row.get(key) for key in identity)]
    harness.write("distributed", [*records, row], folder)
    print({key: value for key, value in row.items() if not key.startswith("losses")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("ddp", "fsdp2"))
    parser.add_argument("--method", choices=("poetx", "adamw"), default="poetx", help="of ddp")
    parser.add_argument("--model", choices=MODELS, default="1B")
    parser.add_argument("--batch", type=int, default=4, help="sequences: of a rank with ddp, of all with fsdp2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of fsdp2")
    parser.add_argument("--checkpoint", type=Path, help="folder of fsdp2's distributed checkpoints")
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    if torch.distributed.is_torchelastic_launched():
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
        if DEVICE == "cuda":
            torch.cuda.set_device(rank())
    own = {"case": arguments.case, "model": arguments.model, "ranks": world_size(), "device": DEVICE}
    if arguments.case == "ddp":
        record(own | ddp(arguments), arguments.output)
    else:
        for seed in arguments.seeds:
            record(own | fsdp2(arguments, seed), arguments.output)
    if dist.is_initialized():
        dist.barrier()  # rank 0 is still writing
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
