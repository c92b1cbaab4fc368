"""Launching kernels with little work on the host: small layers are bound by it, not by the GPU."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

# Kernels already compiled, by all that Triton compiles them for: code, device, constants, types and divisibilities.
_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    integers: tuple[int, ...],
    constants: tuple,
    num_warps: int,
    num_stages: int = 1,
) -> None:
    """Run `kernel(*tensors, *integers, *constants)` on the GPU of the first tensor.

    A kernel compiled before is started directly: Triton's own dispatch would inspect every argument again. The key
    holds what Triton specializes on, whether an integer is 1 or a multiple of 16; tensors must start at multiples of
    16 bytes (`aligned`).
    """
    device = tensors[0].get_device()
    key = (
        id(kernel), device, constants, num_warps, num_stages,
        *[None if tensor is None else tensor.dtype for tensor in tensors],
        *[1 if n == 1 else n % 16 == 0 and 16 for n in integers],
    )  # fmt: skip
    compiled = _compiled.get(key)
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, integers, constants, num_warps, num_stages)
    elif compiled is not None:
        compiled[grid](*tensors, *integers, *constants)
    else:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = kernel[grid](*tensors, *integers, *constants, **options)
        if compiled is not None:  # the interpreter returns nothing
            _compiled[key] = compiled


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, dense in row-major or column-major order and at an address that is a multiple of 16 bytes."""
    if not (tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())):
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def power_of_two_divisor(*numbers: int) -> int:
    """Largest power of two that divides all numbers."""
    bits = 0
    for number in numbers:
        bits |= number
    return bits & -bits
