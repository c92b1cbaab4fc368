"""Small models and training loops shared by the tests."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_flashoptim import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW, cast_model

# Every optimizer in a variant that keeps all the state it can.
ALL = {
    "adamw": (FlashAdamW, {}),
    "adam": (FlashAdam, {"weight_decay": 0.01}),
    "lion": (FlashLion, {"weight_decay": 0.01}),
    "sgd": (FlashSGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "sgdw": (FlashSGDW, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_without_momentum": (FlashSGD, {}),
}


def small_model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    """Matrices with whole and short groups, biases, a norm, and a convolution."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 70), nn.LayerNorm(70), nn.Tanh(), nn.Linear(70, 5)
    )
    cast_model(model, dtype)
    return model


def mixed_model(seed: int = 0) -> nn.Sequential:
    """Parameters in bf16, fp16 and fp32."""
    model = small_model(torch.float32, seed)
    model[0].to(torch.bfloat16)
    model[2].to(torch.float16)
    return model


def set_gradients(model: nn.Module, seed: int) -> None:
    """The same gradients for the same seed, whatever the model computes."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: FlashOptimizer) -> dict[str, Tensor]:
    """Everything that training has changed, by name."""
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[name] = p.detach().clone()
        tensors.update({f"{name}.{key}": value.clone() for key, value in optimizer.state[p].items()})
    return tensors


def assert_bit_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name
