"""Registering a step op: one schema, an implementation for the CPU, and a kernel that is imported at its first call."""

from collections.abc import Callable

import torch


def register_step(
    name: str,
    implementation: Callable[..., None],
    mutated: tuple[str, ...],
    load_kernel: Callable[[], Callable[..., None]],
) -> torch._ops.OpOverload:
    """Register ``hf_flashoptim::name``, an op that steps lists of tensors in place and returns nothing.

    Registered by ``torch.library``'s functions rather than its ``custom_op``, whose Python wrapper converts the lists
    several times: for a model of a hundred tensors that is most of a step's time on the host.

    Args:
        name: of the op.
        implementation: in plain PyTorch, for the CPU; the first of its arguments are the parameters.
        mutated: names of the arguments that it changes.
        load_kernel: imports and returns the implementation for GPUs.
    """
    qualified = f"hf_flashoptim::{name}"
    torch.library.define(qualified, torch.library.infer_schema(implementation, mutates_args=mutated))
    kernels: list[Callable[..., None]] = []

    def launch(*args: object) -> None:
        if not kernels:
            kernels.append(load_kernel())
        kernels[0](*args)
        # What autograd saved of a parameter is no longer what it was, and backward has to notice.
        torch.autograd.graph.increment_version(args[0])

    torch.library.impl(qualified, "cpu", implementation)
    torch.library.impl(qualified, "cuda", launch)
    torch.library.register_fake(qualified, lambda *args: None)
    return getattr(torch.ops.hf_flashoptim, name).default
