"""Dense blocks of rotations kept between forward passes, so that generation does not build them anew at every token."""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .ops.rotate import rotate
from .ops.rotation import Rotation


class _Kept(NamedTuple):
    """What blocks were made of and after how many steps of optimizers, and the blocks."""

    made_of: list[Tensor]
    versions: list[int]
    steps: int
    blocks: tuple[Tensor, Tensor | None]


class _OptimizerSteps:
    """Number of steps that all optimizers of this process have taken."""

    count = 0

    @classmethod
    def add(cls, *_: object) -> None:
        # A compiled step raises the version of what it changes, and would be compiled anew for every count.
        if not torch.compiler.is_compiling():
            cls.count += 1


# Fused optimizers of torch write parameters without raising their version.
register_optimizer_step_post_hook(_OptimizerSteps.add)


class BlockCache:
    """The blocks of a layer's rotations, as long as the skew entries are those that they were made of.

    On the CPU that is asked of the values themselves, which costs far less than the blocks. Elsewhere values cannot be
    compared without waiting for the device, so it is asked of the tensors: the same memory at the same version, and no
    optimizer has stepped since. No version counts a write through ``.data``; that is seen after the next `clear`, which a
    layer calls in every forward pass with gradients and when it goes into training mode.

    It is empty in copies and pickles of a layer.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def __reduce__(self) -> tuple:
        return BlockCache, ()

    def clear(self) -> None:
        """Forget all blocks, and free their memory."""
        self._kept.clear()

    def rotate(self, key: Hashable, x: Tensor, rotation: Rotation, bias: Tensor | None = None) -> Tensor:
        """``rotation.apply(x, bias=bias)``, without a gradient, with the blocks kept under `key`."""
        blocks, tail = self._blocks(key, rotation, x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        return rotate(rows, blocks, tail, rotation.permutation, rotation.permutation_group, False, bias).view(x.shape)

    def _blocks(self, key: Hashable, rotation: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        entries = [t.detach() for t in (rotation.entries, rotation.tail) if t is not None]
        # Read once: replicas of a layer in other threads share this cache.
        kept = self._kept.get((key, dtype))
        if kept is None or not _unchanged(kept, entries):
            on_cpu = entries[0].device.type == "cpu"
            # What is held elsewhere shares memory and version with the entries, so no other tensor can take its place.
            made_of = [t.clone() for t in entries] if on_cpu else entries
            kept = _Kept(made_of, _versions(entries), _OptimizerSteps.count, rotation.blocks(dtype))
            self._kept[key, dtype] = kept
        return kept.blocks


def _unchanged(kept: _Kept, entries: list[Tensor]) -> bool:
    if len(kept.made_of) != len(entries):
        return False
    for old, new in zip(kept.made_of, entries, strict=True):
        if old.device != new.device or old.dtype != new.dtype or old.shape != new.shape:
            return False
    if entries[0].device.type == "cpu":
        return all(torch.equal(old, new) for old, new in zip(kept.made_of, entries, strict=True))
    same_memory = all(old.data_ptr() == new.data_ptr() for old, new in zip(kept.made_of, entries, strict=True))
    return same_memory and kept.versions == _versions(entries) and kept.steps == _OptimizerSteps.count


def _versions(entries: list[Tensor]) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in entries]


def can_keep_blocks(rotations: list[Rotation]) -> bool:
    """Whether blocks may be kept: where no gradient is asked for, and what changes entries can be seen.

    Sharded training refills the memory of entries without a new version, and a captured graph replays with its own.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    for rotation in rotations:
        entries = rotation.entries
        if isinstance(entries, DTensor) or (entries.is_inference() and entries.device.type != "cpu"):
            return False
        if entries.device.type != "cpu" and torch.distributed.is_available() and torch.distributed.is_initialized():
            return False
        if entries.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
    return True
