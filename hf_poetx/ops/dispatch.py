"""On which way an operation is called, and what of the caller's state must not reach it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_watched(x: Tensor) -> bool:
    """Whether anything but the GPU wants to see one operation: another device, a compiler, a subclass or a mode.

    A small layer on a GPU is bound by the work of the host, and the dispatcher is a fifth of it.
    """
    return (
        not x.is_cuda
        or torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def without_autocast(device_type: str) -> AbstractContextManager:
    """Operations inside compute in the dtype of their inputs."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
