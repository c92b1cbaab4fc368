"""State of sharded parameters: every state tensor of a DTensor is a DTensor in the same mesh.

Distributed checkpoints need that, with explicit global shapes: ``DTensor.from_local`` alone would infer a wrong one
where a dimension is sharded unevenly.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from hf_flashoptim.ops.layout import group_dim

ShapeMap = Callable[[Sequence[int]], Sequence[int]]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_mesh_of(param: Tensor, local: Tensor, global_shape: Sequence[int]) -> Tensor:
    """Wrap this rank's part of a state tensor like its parameter; leading dimensions are the parameter's."""
    if not isinstance(param, DTensor):
        return local
    stride = torch.empty(tuple(global_shape), device="meta").stride()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=torch.Size(global_shape), stride=stride
    )


def zeros_for(param: Tensor, dtype: torch.dtype, shape_map: ShapeMap = tuple) -> Tensor:
    """Zero state of ``shape_map(param.shape)``, contiguous, sharded like the parameter."""
    local = local_part(param)
    zeros = torch.zeros(tuple(shape_map(local.shape)), dtype=dtype, device=local.device)
    return in_mesh_of(param, zeros, shape_map(param.shape))


def map_local(param: Tensor, function: Callable[..., Tensor], *tensors: Tensor, shape_map: ShapeMap = tuple) -> Tensor:
    """Apply ``function`` to this rank's parts of state tensors; its result has ``shape_map`` of the parameter's shape."""
    return in_mesh_of(param, function(*map(local_part, tensors)), shape_map(param.shape))


def distribute_like(param: Tensor, full: Tensor) -> Tensor:
    """This rank's part of a whole tensor whose leading dimensions are the parameter's, as a DTensor in its mesh."""
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def check_not_flattened(param: Tensor) -> None:
    """Refuse a parameter that FSDP1 has flattened: without its rows there are no groups to quantize.

    Raises:
        ValueError: saying what to use instead.
    """
    # FullyShardedDataParallel sets the mark on its flat parameters and on the originals that are views of them.
    if getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) flattens parameters, so compressed optimizers cannot step them. Use "
            "FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in Trainer and accelerate."
        )


def check_groups_are_whole(param: Tensor) -> None:
    """Refuse a DTensor that is sharded along the dimension that quantization groups run along.

    Raises:
        ValueError: for a group that would lie on two ranks, or a parameter that is a sum over ranks.
    """
    if not isinstance(param, DTensor):
        return
    for placement in param.placements:
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if isinstance(placement, Partial) or dim is None or dim % param.ndim >= group_dim(param.shape):
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} with placements {tuple(param.placements)} cannot be "
                f"quantized: groups of 32 run along dimensions {group_dim(param.shape)} and up, which must not be "
                "sharded. Shard dimension 0 (as fully_shard does), or set quantize=False in its parameter group."
            )
