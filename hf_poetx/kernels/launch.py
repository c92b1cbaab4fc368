"""Launching kernels with little work on the host: small layers are bound by it, not by the GPU."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
from torch import Tensor


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision` for operands of a dtype: TF32 for fp32 where PyTorch's own products have it.

    The older of PyTorch's two switches cannot be asked once the newer is set, as transformers does for `tf32=True` and
    `torch_compile=True`; the newer, of torch 2.9, knows what either says.
    """
    if dtype != torch.float32:
        return "ieee"  # which 16-bit operands ignore
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class Plan:
    """How to launch a kernel on tensors of given types and shapes on one GPU; made once for them and kept.

    Calling it with the tensors runs ``kernel(*tensors, *integers, *constants)`` on the current stream. From the second
    call on the compiled kernel is started directly with addresses, where Triton's own dispatch would inspect every
    argument again; so the tensors must always have the same types and start at multiples of 16 bytes (`aligned`).
    Triton's launch hooks see only the first call.

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

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.start is None:
            self._compile_and_run(tensors)
        elif torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                self(*tensors)
        else:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            self.start(*self.grid, self.get_stream(self.device), *self.handles, *addresses, *self.arguments)

    def _compile_and_run(self, tensors: tuple[Tensor | None, ...]) -> None:
        device = tensors[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if compiled is not None:  # the interpreter compiles nothing, and is asked again every time
            self.device = device.index
            self.get_stream = triton.runtime.driver.active.get_current_stream
            self.compiled = compiled  # kept, because Triton 3.8 unloads a kernel that nothing refers to
            # Its handle, what the launcher must know of it, and no hooks.
            self.handles = (compiled.function, compiled.packed_metadata, None, None, None)
            self.start = compiled.run


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
