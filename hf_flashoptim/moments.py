"""The two kinds of moments that optimizers keep, and the names of their tensors in ``optimizer.state[p]``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_flashoptim.ops.companding import (
    decode_first_moment,
    decode_second_moment,
    dequantize_first_moment,
    dequantize_second_moment,
    quantize_first_moment,
    quantize_second_moment,
)


@dataclass(frozen=True)
class Moment:
    """A moment: its fp32 tensor is called ``name``, as in ``torch.optim``; its codes and scales have names of their own.

    Attributes:
        name: ``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer``.
        code_dtype: int8 or uint8.
        quantize: fp32 moment to codes and scales.
        dequantize: codes and scales to the fp32 moment.
        decode_rows: codes ``[rows, cols]`` and scales ``[rows, groups]`` to fp32 ``[rows, cols]``, of a second moment
            its root.
    """

    name: str
    code_dtype: torch.dtype
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantize: Callable[[Tensor, Tensor], Tensor]
    decode_rows: Callable[[Tensor, Tensor], Tensor]

    @cached_property
    def codes_key(self) -> str:
        """Name of the 8-bit codes."""
        return f"{self.name}_codes"

    @cached_property
    def scale_key(self) -> str:
        """Name of the bf16 scales."""
        return f"{self.name}_scale"


def first_moment(name: str) -> Moment:
    """A running mean of gradients, of either sign."""
    return Moment(name, torch.int8, quantize_first_moment, dequantize_first_moment, decode_first_moment)


def second_moment(name: str) -> Moment:
    """A running mean of squared gradients."""
    return Moment(name, torch.uint8, quantize_second_moment, dequantize_second_moment, decode_second_moment)
