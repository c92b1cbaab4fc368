"""Many tensors in one launch: a table of their addresses and sizes on the GPU.

The table is int64 ``[columns, tensors]``, followed by fp32 coefficients of each tensor. It is written by kernels that
receive its values as arguments: this neither waits for the GPU nor depends on host memory, and a captured CUDA graph
writes it again at every replay. Nothing is kept from one step to the next.

Elements are worked on in tiles of consecutive groups of 32, one tile a program; the table holds the first program of
every tensor, and a program finds its tensor by bisection.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_flashoptim.kernels.launch import launch

GROUP_SIZE = tl.constexpr(32)
# Columns of the table; a kind of tensor that is not kept has zeros, or no column at the end of the table.
START, GROUPS, PARAM, GRAD, FIRST, STEP, ERRORS, FIRST_SCALE, SECOND, SECOND_SCALE, ROW_GROUPS, COLS = (
    tl.constexpr(column) for column in range(12)
)
# Up to twice as many fp32 coefficients.
COEFFICIENT_COLUMNS = 3
# A warp works on a tile of 16 elements a thread, and on several tiles in turn, which share the search for their tensor.
TILE_GROUPS = 16
TILES = 4
# What a launch may rely on in all of its tensors. REGULAR: rows consist of whole groups, and every tensor starts at a
# multiple of 16 bytes. WHOLE: tensors consist of whole tiles besides, so that no access is masked.
IRREGULAR, REGULAR, WHOLE = (tl.constexpr(layout) for layout in range(3))
# Values passed as arguments have this bit set where they would be small: Triton takes every one of them as an int64.
_WIDE = 1 << 62
# How many of them one launch takes (at most 4 KiB); few choices mean few compilations.
_ARGUMENT_COUNTS = (16, 64, 256)


class Tensors(NamedTuple):
    """The tensors of a step by kind, in the order of the table's columns; empty lists where a kind is not kept."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    first_moments: Sequence[Tensor]
    steps: Sequence[Tensor] = ()
    errors: Sequence[Tensor] = ()
    first_scales: Sequence[Tensor] = ()
    second_moments: Sequence[Tensor] = ()
    second_scales: Sequence[Tensor] = ()


class Preparation(NamedTuple):
    """The kernel that writes the table and the coefficients.

    Its arguments stand after the learning rate's, its constants before the learning rate's.
    """

    kernel: triton.JITFunction
    arguments: tuple
    constants: tuple = ()


class Step(NamedTuple):
    """The kernel that does the step.

    Its arguments stand after the table's, its constants before the part's. Registers of a thread are limited where
    more would leave too few warps to hide the latency of memory, and where the limit spills none.
    """

    kernel: triton.JITFunction
    arguments: tuple
    constants: tuple
    max_registers: int | None = None


def run_step(kinds: Tensors, lr: Tensor, preparation: Preparation, step: Step) -> None:
    """Step tensors of one parameter dtype and one kind of state.

    Args:
        kinds: tensors that are contiguous.
        lr: learning rate, shape ``[]``, on the CPU or on the GPU.
        preparation: see there.
        step: see there.
    """
    device = kinds.params[0].device
    learning_rate = (float(lr), 0) if lr.is_cpu else (0.0, lr.data_ptr())
    lr_dtype = None if lr.is_cpu else lr.dtype
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in kinds]
    groups = [scale.numel() for scale in kinds.first_scales] or [-(-p.numel() // 32) for p in kinds.params]
    for (grad_dtype, layout), members in _parts(kinds, addresses, groups).items():
        values, programs = _entries(kinds, addresses, groups, members, layout)
        tensors = len(members)
        table = torch.empty(len(values) + COEFFICIENT_COLUMNS * tensors + 256, dtype=torch.int64, device=device)
        arguments = (table, tensors, len(values))
        for first, count in _batches(len(values)):
            batch = values[first : first + count]
            batch += [_WIDE] * (count - len(batch))
            launch(
                preparation.kernel,
                1,
                (*arguments, first, *learning_rate, *preparation.arguments, tuple(batch)),
                (*preparation.constants, lr_dtype, first + count >= len(values)),
                device,
                num_warps=4,
            )
        if programs:
            constants = (*step.constants, grad_dtype, layout, TILES, TILE_GROUPS)
            step_arguments = (*arguments, *step.arguments)
            launch(step.kernel, programs, step_arguments, constants, device, max_registers=step.max_registers)


def _batches(total: int) -> Iterator[tuple[int, int]]:
    """First value and number of values of every launch that writes the table."""
    first = 0
    while first < total:
        count = next((c for c in _ARGUMENT_COUNTS if c >= total - first), _ARGUMENT_COUNTS[-1])
        yield first, count
        first += count


def _parts(kinds: Tensors, addresses: list[list[int]], groups: list[int]) -> dict[tuple[torch.dtype, int], list[int]]:
    """Indices of the tensors that one launch takes, by the gradients' dtype and the layout that they have in common."""
    aligned = not reduce(or_, chain.from_iterable(addresses)) & 15
    parts: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, (param, grad) in enumerate(zip(kinds.params, kinds.grads, strict=True)):
        regular = groups[index] * 32 == param.numel()
        if not aligned:
            regular = regular and not any(column[index] & 15 for column in addresses if column)
        layout = IRREGULAR if not regular else REGULAR if groups[index] % TILE_GROUPS else WHOLE
        parts.setdefault((grad.dtype, layout.value), []).append(index)
    return parts


def _entries(
    kinds: Tensors, addresses: list[list[int]], groups: list[int], members: list[int], layout: int
) -> tuple[list[int], int]:
    """The table's entries, column by column, and the number of programs."""
    entries, programs = [], 0
    for i in members:
        entries.append(programs | _WIDE)
        programs += -(-groups[i] // (TILE_GROUPS * TILES))
    entries += [groups[i] | _WIDE for i in members]
    irregular = layout == IRREGULAR.value
    # A regular table ends with the last kind that is kept.
    used = len(addresses) if irregular else max(column for column, known in enumerate(addresses, 1) if known)
    for known in addresses[:used]:
        # An empty tensor has the address 0.
        entries += [known[i] or _WIDE for i in members] if known else [_WIDE] * len(members)
    if irregular:
        scales = kinds.first_scales
        row_groups = [scales[i].shape[-1] if scales else groups[i] for i in members]
        entries += [count | _WIDE for count in row_groups]
        for i, count in zip(members, row_groups, strict=True):
            entries.append(kinds.params[i].numel() * count // max(groups[i], 1) | _WIDE)
    return entries, programs


@triton.jit
def write_table(table, first, values):
    """Write values given as arguments into the table, from its entry ``first`` on."""
    for i in tl.static_range(len(values)):
        tl.store(table + first + i, values[i] & 0x3FFFFFFFFFFFFFFF)


@triton.jit
def entry(table, tensors, tensor, COLUMN: tl.constexpr):
    """One entry of the table."""
    return tl.load(table + COLUMN * tensors + tensor)


@triton.jit
def find_work(table, tensors, TILES: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """The tensor that this program works on, its number of groups, and the first and the end of the tiles to do."""
    program = tl.program_id(0)
    tensor = program * 0
    last = tensor + tensors - 1
    while tensor < last:
        middle = (tensor + last + 1) // 2
        if entry(table, tensors, middle, START) <= program:
            tensor = middle
        else:
            last = middle - 1
    first = (program - entry(table, tensors, tensor, START).to(tl.int32)) * TILES
    groups = entry(table, tensors, tensor, GROUPS).to(tl.int32)
    return tensor, groups, first, tl.minimum(first + TILES, (groups + (TILE_GROUPS - 1)) // TILE_GROUPS)


@triton.jit
def base(table, tensors, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Pointer to a tensor; to one of bf16 as int16, whose bit patterns also the interpreter handles exactly."""
    STORED: tl.constexpr = tl.int16 if DTYPE == tl.bfloat16 else DTYPE
    address = entry(table, tensors, tensor, COLUMN).to(tl.pointer_type(STORED))
    if LAYOUT != IRREGULAR:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def offsets(table, tensors, tensor, groups, tile, TILE_GROUPS: tl.constexpr, LAYOUT: tl.constexpr):
    """Offsets ``[groups, 32]`` of a tile's elements and the mask of those that exist; the same for its groups."""
    local_group = tl.arange(0, TILE_GROUPS)
    lane = tl.arange(0, GROUP_SIZE)[None, :]
    first_group = tile * TILE_GROUPS
    if LAYOUT == WHOLE:
        group_mask = tl.full([TILE_GROUPS], True, tl.int1)
    else:
        group_mask = local_group < groups - first_group
    group = first_group.to(tl.int64) + local_group
    if LAYOUT != IRREGULAR:
        offset = first_group.to(tl.int64) * GROUP_SIZE + (local_group[:, None] * GROUP_SIZE + lane)
        mask = group_mask[:, None]
    else:
        row_groups = entry(table, tensors, tensor, ROW_GROUPS)
        row = group // row_groups
        col = ((group - row * row_groups) * GROUP_SIZE)[:, None] + lane
        cols = entry(table, tensors, tensor, COLS)
        offset = (row * cols)[:, None] + col
        mask = group_mask[:, None] & (col < cols)
    return offset, mask, group, group_mask


@triton.jit
def load(pointers, mask, LAYOUT: tl.constexpr):
    """Values, zero where a group has less than 32; in groups that don't exist they are undefined unless ``IRREGULAR``."""
    if LAYOUT == IRREGULAR:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers, mask=mask)
