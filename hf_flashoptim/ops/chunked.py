"""Reading and writing parameters and moments piece by piece, in fp32, whatever they are stored as.

This is how the step ops on the CPU keep their temporary memory small and independent of the parameter's size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_flashoptim.ops.companding import (
    decode_first_moment,
    decode_second_moment,
    encode_first_moment,
    encode_second_moment,
    saturating_square,
    second_moment_dither,
)
from hf_flashoptim.ops.error_correction import reconstruct_master_weight, split_master_weight
from hf_flashoptim.ops.layout import Chunk, chunks, rows_and_cols


def walk(param: Tensor, quantized: bool) -> tuple[tuple[int, int], Iterator[Chunk]]:
    """Shape ``[rows, cols]`` in which to walk through a parameter, and the walk."""
    shape = rows_and_cols(param.shape) if quantized else (1, param.numel())
    return shape, chunks(*shape)


class MasterWeight:
    """The fp32 weight behind a contiguous parameter: itself, or rebuilt from its error bits, if any.

    Args:
        param: fp32, bf16 or fp16.
        errors: int8 or int16 of the same shape, or None.
        shape: ``(rows, cols)`` to walk through it.
    """

    def __init__(self, param: Tensor, errors: Tensor | None, shape: tuple[int, int]) -> None:
        self._param = param.view(shape)
        self._errors = None if errors is None else errors.view(shape)

    def read(self, chunk: Chunk) -> Tensor:
        """The weight in fp32; for an fp32 parameter its own memory, so that updating it in place writes it."""
        piece = self._param[chunk.rows, chunk.cols]
        if self._errors is None:
            return piece.to(torch.float32)
        return reconstruct_master_weight(piece, self._errors[chunk.rows, chunk.cols])

    def write(self, chunk: Chunk, master: Tensor) -> None:
        """Round the weight to the parameter, and what is lost to its error bits."""
        piece = self._param[chunk.rows, chunk.cols]
        if self._errors is None:
            if piece.dtype != master.dtype:
                piece.copy_(master)
            return
        narrow, errors = split_master_weight(master, piece.dtype, self._errors.dtype)
        piece.copy_(narrow)
        self._errors[chunk.rows, chunk.cols].copy_(errors)


class FirstMoment:
    """An fp32 first moment, or its codes with their scales.

    Args:
        values: fp32 moments, or int8 codes.
        scale: bf16 scales of the codes, or None with fp32 moments.
        shape: ``(rows, cols)`` to walk through it.
    """

    _decode: Callable[[Tensor, Tensor], Tensor] = staticmethod(decode_first_moment)
    _encode: Callable[[Tensor], tuple[Tensor, Tensor]] = staticmethod(encode_first_moment)

    def __init__(self, values: Tensor, scale: Tensor | None, shape: tuple[int, int]) -> None:
        self._values = values.view(shape)
        self._scale = None if scale is None else scale.view(shape[0], -1)

    def read(self, chunk: Chunk, factor: float) -> Tensor:
        """The moment times a factor, in fp32; never the moment's own memory."""
        piece = self._values[chunk.rows, chunk.cols]
        if self._scale is None:
            return self._from_stored(piece) * factor
        return self._decode(piece, self._scale[chunk.rows, chunk.groups].float() * factor)

    def write(self, chunk: Chunk, moment: Tensor) -> None:
        """Store the updated moment."""
        if self._scale is None:
            self._values[chunk.rows, chunk.cols].copy_(self._to_stored(moment))
            return
        codes, scale = self._encode(moment)
        self._values[chunk.rows, chunk.cols].copy_(codes)
        self._scale[chunk.rows, chunk.groups].copy_(scale)

    @staticmethod
    def _from_stored(piece: Tensor) -> Tensor:
        return piece

    @staticmethod
    def _to_stored(moment: Tensor) -> Tensor:
        return moment


class SecondMoment(FirstMoment):
    """An fp32 second moment, or its codes with their scales; read and written as its root.

    Args:
        values: fp32 moments, or uint8 codes.
        scale: bf16 scales of the codes, or None with fp32 moments.
        shape: ``(rows, cols)`` to walk through it.
        step: the step that it is written in.
    """

    _decode = staticmethod(decode_second_moment)

    def __init__(self, values: Tensor, scale: Tensor | None, shape: tuple[int, int], step: float) -> None:
        super().__init__(values, scale, shape)
        self._encode = partial(encode_second_moment, dither=second_moment_dither(step))

    _from_stored = staticmethod(torch.sqrt)
    _to_stored = staticmethod(saturating_square)


def read_gradient(grad: Tensor, chunk: Chunk, maximize: bool) -> Tensor:
    """A piece of a gradient ``[rows, cols]`` in fp32, with the sign that descends; not to be changed in place."""
    piece = grad[chunk.rows, chunk.cols].to(torch.float32)
    return piece.neg() if maximize else piece


def item(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    """Entry of a list of state tensors, None where this kind of state is not kept (an empty list)."""
    return tensors[index] if tensors else None
