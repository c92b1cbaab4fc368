"""Inputs of the step ops for tests: parameters of several shapes and their state, compressed or not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hf_flashoptim.ops.layout import scale_shape

SHAPES = [(96, 64), (5, 70), (40, 3, 3, 3), (0, 64)]
KINDS = [
    pytest.param(torch.float32, None, True, id="fp32-quantized"),
    pytest.param(torch.bfloat16, torch.int8, True, id="bf16-24bit"),
    pytest.param(torch.bfloat16, torch.int16, True, id="bf16-32bit"),
    pytest.param(torch.float16, torch.int8, True, id="fp16-24bit"),
    pytest.param(torch.bfloat16, None, False, id="bf16-fp32-moments"),
]


def parameters(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, scale: float = 1.0) -> list[Tensor]:
    return [torch.randn(shape).mul(scale).to(dtype) for shape in shapes]


def errors_for(params: Sequence[Tensor], error_dtype: torch.dtype | None) -> list[Tensor]:
    return [] if error_dtype is None else [torch.zeros(p.shape, dtype=error_dtype) for p in params]


def moments_for(
    params: Sequence[Tensor], quantized: bool, code_dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Zero moments: values or codes, and scales (none for fp32 moments)."""
    if not quantized:
        return [torch.zeros(p.shape) for p in params], []
    scales = [torch.zeros(scale_shape(p.shape), dtype=torch.bfloat16) for p in params]
    return [torch.zeros(p.shape, dtype=code_dtype) for p in params], scales


def clone(args: Sequence[object]) -> list[object]:
    """Copies of all tensors, so that an op can be run twice from the same start."""
    return [a.clone() if isinstance(a, Tensor) else [t.clone() for t in a] if isinstance(a, list) else a for a in args]


def run(op: Callable[..., None], args: Sequence[object]) -> list[object]:
    """What a call leaves behind."""
    after = clone(args)
    op(*after)
    return after


def assert_same(left: Sequence[object], right: Sequence[object]) -> None:
    """Bit-equal tensors, NaN included."""
    for a, b in zip(left, right, strict=True):
        if isinstance(a, list):
            assert_same(a, b)
        elif isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
