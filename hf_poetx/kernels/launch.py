"""Launching kernels with little work on the host: small layers are bound by it, not by the GPU."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor


class Plan:
    """How to launch a kernel on tensors of given types and shapes on one GPU; made once for them and kept.

    Calling it with the tensors runs ``kernel(*tensors, *integers, *constants)`` on the current stream. From the second
    call on the compiled kernel is started directly with addresses, where Triton's own dispatch would inspect every
    argument again; so the tensors must always have the same types and start at multiples of 16 bytes (`aligned`).

    Args:
        kernel: the Triton function.
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
        self.start: Callable | None = None
        self.get_stream: Callable[[int], int] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*tensors)
        elif self.start is not None:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            self.start(*addresses, *self.arguments, stream=self.get_stream(device))
        else:
            compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
            if compiled is not None:  # the interpreter compiles nothing, and is asked again every time
                self.start = compiled[self.grid]
                self.get_stream = triton.runtime.driver.active.get_current_stream


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
