"""Launching kernels with little work on the host: gradient release launches them once for every parameter."""

from collections.abc import Sequence

import torch
import triton

# Compiled kernels by everything that Triton compiles for. Arguments are annotated in the kernels, so that it is only
# code, constants, the number of values and the device, never an argument's value.
_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


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

    After the first call with given constants the compiled kernel is started directly: Triton's own dispatch would
    inspect every argument again. Fused multiply-adds are written out in the kernels and never made by the compiler,
    because the results have to match the CPU's.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, arguments, constants, device, num_warps, max_registers)
    key = (kernel, device.index, constants, *[len(a) for a in arguments if isinstance(a, tuple)])
    grid = (programs, 1, 1)
    if compiled := _compiled.get(key):
        compiled[grid](*arguments, *constants)
        return None
    options = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": max_registers}
    compiled = kernel[grid](*arguments, *constants, **options)
    if compiled is not None:  # the interpreter returns nothing
        _compiled[key] = compiled
    return None
