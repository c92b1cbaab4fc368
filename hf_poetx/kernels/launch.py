"""Launching kernels with little work on the host: small layers are bound by it, not by the GPU."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor


class Plan:
    """How to launch a kernel on tensors of given types and shapes; made once for them and kept, see `launch`.

    Args:
        kernel: the Triton function, called as ``kernel(*tensors, *integers, *constants)``.
        grid: numbers of programs.
        integers: shapes and strides.
        constants: the compile-time arguments.
        num_warps: of a program.
        num_stages: depth of the load pipeline.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        constants: tuple,
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        self.kernel, self.grid = kernel, grid
        self.arguments = (*integers, *constants)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self.compiled: triton.compiler.CompiledKernel | None = None


def launch(plan: Plan, tensors: Sequence[Tensor | None]) -> None:
    """Run the plan's kernel on the GPU of the first tensor.

    All launches of a plan must have tensors of the same types on the same GPU, at multiples of 16 bytes (`aligned`):
    from the second one on the compiled kernel is started directly, where Triton's own dispatch would inspect every
    argument again.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(plan, tensors)
    elif plan.compiled is not None:
        plan.compiled[plan.grid](*tensors, *plan.arguments)
    else:  # the interpreter returns nothing, and is asked again every time
        plan.compiled = plan.kernel[plan.grid](*tensors, *plan.arguments, **plan.options)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, dense in row-major or column-major order and at an address that is a multiple of 16 bytes."""
    if not (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())):
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def ceil_divide(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


def power_of_two_divisor(*numbers: int) -> int:
    """Largest power of two that divides all numbers."""
    bits = 0
    for number in numbers:
        bits |= number
    return bits & -bits


def is_hopper(device: torch.device) -> bool:
    """Whether tiles tuned on an H200 fit."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
