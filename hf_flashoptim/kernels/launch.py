"""Launching kernels with little work on the host: gradient release launches them all through a backward pass."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

# Compiled kernels, by everything that Triton compiles for. Arguments are annotated in the kernels, so that it is only
# code, constants, the number of values and the device, never an argument's value.
_compiled: dict[tuple, CompiledKernel] = {}
TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
}


def launch(
    kernel: triton.JITFunction,
    programs: int,
    arguments: Sequence[object],
    constants: tuple,
    device: torch.device,
    num_warps: int = 1,
    max_registers: int | None = None,
) -> None:
    """Run ``kernel(*arguments, *constants)`` on a GPU, or on the CPU under Triton's interpreter.

    Among the constants are PyTorch's dtypes, which the kernel gets as Triton's: those take a microsecond to hash.
    The last argument may be a tuple of values. After the first call with given constants the compiled kernel is started
    directly: Triton's own dispatch would inspect every argument again. Fused multiply-adds are written out in the
    kernels and never made by the compiler, because the results have to match the CPU's.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, arguments, constants, device, num_warps, max_registers)
    values = len(arguments[-1]) if isinstance(arguments[-1], tuple) else 0
    key = (id(kernel), device.index, values, constants)
    grid = (programs, 1, 1)
    if compiled := _compiled.get(key):
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        compiled[grid](*arguments, *constants, stream=stream)
        return None
    options = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": max_registers}
    translated = [TRITON_DTYPES.get(c, c) if isinstance(c, torch.dtype) else c for c in constants]
    compiled = kernel[grid](*arguments, *translated, **options)
    if compiled is not None:  # the interpreter returns nothing
        _compiled[key] = compiled
    return None
