"""Permutations of a layer, and the weight that a layer's two rotations make of its base weight."""

import contextlib
import hashlib
from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor

from .ops.cayley import cayley
from .ops.rotate import rotate
from .ops.rotation import Rotation


def split_width(width: int, block: int) -> tuple[int, int, int]:
    """How a width is divided: block size, number of full blocks, size of the smaller last block (0 if none).

    Widths below `block` form one block of their own size.

    Example:
        >>> split_width(576, 256), split_width(192, 256), split_width(512, 256)
        ((256, 2, 64), (192, 1, 0), (256, 2, 0))
    """
    block = min(block, width)
    return block, width // block, width % block


def draw_permutation(width: int, group: int, seed: int, name: str, merge_count: int) -> Tensor:
    """Permutation of a layer's columns, the same on every rank and machine without communication.

    It is drawn on the CPU by a generator of its own, seeded with a stable hash of all arguments, so the global random
    state is neither read nor changed.

    Args:
        width: number of columns.
        group: columns that stay together; where it does not divide the width, their greatest common divisor does.
        seed: of the run.
        name: canonical name of the layer and side, such as ``model.layers.0.mlp.up_proj.in``.
        merge_count: merges before this draw; every merge draws anew.

    Returns:
        ``[width]`` int32.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{merge_count}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    group = gcd(width, group)
    starts = torch.randperm(width // group, generator=generator) * group
    return (starts[:, None] + torch.arange(group)).flatten().int()


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in true fp32: autocast, TF32 and bf16 products are off inside, whatever the user set, and restored after."""
    # `fp32_precision` replaces `set_float32_matmul_precision` from torch 2.9 on; the two must not be mixed.
    candidates = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    backends = [backend for backend in candidates if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends] or torch.get_float32_matmul_precision()
    if backends:
        for backend in backends:
            backend.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if backends:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value
        else:
            torch.set_float32_matmul_precision(before)


@torch.no_grad()
def rotated_weight(weight: Tensor, rotation_in: Rotation | None, rotation_out: Rotation | None, exact: bool) -> Tensor:
    """Weight of the plain linear layer that equals the frozen layer between its rotations, in fp32 arithmetic.

        W_eff[p_out][:, p_in] = G_out^T W[p_out][:, p_in] G_in^T

    Args:
        weight: ``[out_features, in_features]``, natural order.
        rotation_in: of the input side, or None.
        rotation_out: of the output side, or None.
        exact: take the exactly orthogonal Cayley transform instead of the polynomial of the forward pass. The first
            keeps the singular values, the second is what the layer computes.

    Returns:
        ``[out_features, in_features]`` fp32 (fp64 for an fp64 weight).
    """
    with full_precision(weight.device):
        result = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        if rotation_in is not None:
            result = _rotate_rows(result, rotation_in, exact, transpose=True)
        if rotation_out is not None:
            result = _rotate_rows(result.mT.contiguous(), rotation_out, exact, transpose=False).mT
        return result.contiguous()


def _rotate_rows(rows: Tensor, rotation: Rotation, exact: bool, transpose: bool) -> Tensor:
    rotation = rotation._replace(
        entries=rotation.entries.to(rows.dtype),
        tail=None if rotation.tail is None else rotation.tail.to(rows.dtype),
    )
    if not exact:
        return rotation.apply(rows, transpose=transpose)
    tail = None if rotation.tail is None else cayley(rotation.tail)[0]
    blocks = cayley(rotation.entries)
    return rotate(rows, blocks, tail, rotation.permutation, rotation.permutation_group, transpose, None)
