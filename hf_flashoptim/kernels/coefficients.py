"""Device functions that turn step counters and the learning rate into each tensor's coefficients, in fp64.

They run once a step, in the kernel that writes the table, so that a step needs nothing from the host.
"""

import triton
import triton.language as tl

from hf_flashoptim.kernels.table import STEP

# Tensors whose coefficients are computed at once.
BLOCK = tl.constexpr(128)
# Steps are counted in fp32, so up to 2^24.
_STEP_BITS = tl.constexpr(25)


@triton.jit
def load_learning_rate(lr, address, DTYPE: tl.constexpr):
    """The learning rate in fp64 ``[BLOCK]``: an argument, or on the GPU."""
    if DTYPE is not None:
        lr = tl.load(address.to(tl.pointer_type(DTYPE)))
    return tl.full((BLOCK,), 0.0, tl.float64) + lr


@triton.jit
def count_step(table, tensors, tensor):
    """Add 1 to step counters, and return them (fp32)."""
    mask = tensor < tensors
    counters = tl.load(table + STEP * tensors + tensor, mask=mask).to(tl.pointer_type(tl.float32))
    step = tl.load(counters, mask=mask, other=0.0) + 1.0
    tl.store(counters, step, mask=mask)
    return step


@triton.jit
def power(base, exponent):
    """``base ^ exponent`` in fp64, for integer exponents given in fp32."""
    bits = exponent.to(tl.int32)
    factor = tl.full((BLOCK,), 0.0, tl.float64) + base
    product = tl.full((BLOCK,), 1.0, tl.float64)
    for _ in tl.static_range(_STEP_BITS):
        product = tl.where((bits & 1) != 0, product * factor, product)
        factor *= factor
        bits = bits >> 1
    return product


@triton.jit
def store_coefficient(table, tensors, coefficients, tensor, INDEX: tl.constexpr, values):
    """Store a coefficient of every tensor in fp32, behind the table's entries."""
    at = (table + coefficients).to(tl.pointer_type(tl.float32)) + INDEX * tensors + tensor
    tl.store(at, values.to(tl.float32), mask=tensor < tensors)


@triton.jit
def load_coefficient(table, tensors, coefficients, tensor, INDEX: tl.constexpr):
    """A coefficient of one tensor."""
    return tl.load((table + coefficients).to(tl.pointer_type(tl.float32)) + INDEX * tensors + tensor)
