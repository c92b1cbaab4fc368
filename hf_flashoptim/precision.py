"""Casting a model to 16 bits, master weights by hand, and whether a learning rate can change weights of a dtype."""

import copy
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_flashoptim.ops.error_correction import compute_error_bits, reconstruct_master_weight

NORMS_WITH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


class NumericsError(RuntimeError):
    """The learning rate is too small to change weights of this magnitude and dtype."""


def largest_magnitude(p: Tensor) -> float:
    """Largest magnitude in a parameter (of all ranks), 0 for an empty one."""
    if not p.numel():
        return 0.0
    largest = p.detach().abs().max()
    return float(largest.full_tensor() if hasattr(largest, "full_tensor") else largest)


def check_learning_rate(p: Tensor, step: float, largest: float, master_weight_bits: int | None) -> None:
    """Raise if an update of this size cannot change the largest weights of a parameter.

    A weight of magnitude in ``[2^e, 2^(e+1))`` with n mantissa bits moves if the update is above half its spacing,
    ``2^(e - n - 1)``; error bits add to the parameter's mantissa bits, up to fp32's 23.

    Args:
        p: the parameter.
        step: size of the update; 0 (a step with learning rate 0) is allowed.
        largest: ``largest_magnitude(p)``, maybe of an earlier step.
        master_weight_bits: 24, 32, or None without error bits.

    Raises:
        NumericsError: naming the sizes and what to change.
    """
    if step == 0 or largest == 0 or not math.isfinite(largest):
        return
    extra = 0 if master_weight_bits is None else master_weight_bits - 16
    mantissa = min(_MANTISSA_BITS[p.dtype] + extra, 23)
    needed = 2.0 ** (math.floor(math.log2(largest)) - mantissa - 1)
    if step <= needed:
        more_bits = "" if p.dtype == torch.float32 or master_weight_bits == 32 else "set master_weight_bits=32, "
        raise NumericsError(
            f"Updates of about {step:.3g} do not change weights of magnitude {largest:.3g} in a parameter of shape "
            f"{tuple(p.shape)} and dtype {p.dtype} with master_weight_bits={master_weight_bits}: they must exceed "
            f"{needed:.3g}. Raise the learning rate, {more_bits}or set check_numerics=False."
        )


def reconstruct_fp32_param(param: Tensor, error_bits: Tensor) -> Tensor:
    """The fp32 master weight of a 16-bit parameter.

    Args:
        param: bf16 or fp16.
        error_bits: int8 or int16 of the same shape, ``optimizer.state[param]["error_bits"]``.

    Raises:
        ValueError: for other dtypes or shapes that differ.
    """
    if param.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"param is {param.dtype}; only bf16 and fp16 parameters have error bits.")
    if error_bits.dtype not in (torch.int8, torch.int16) or error_bits.shape != param.shape:
        raise ValueError(
            f"error_bits is {error_bits.dtype} of shape {tuple(error_bits.shape)}; expected int8 or int16 of shape "
            f"{tuple(param.shape)}."
        )
    return reconstruct_master_weight(param.detach().contiguous(), error_bits.contiguous())


def compute_ecc_bits(fp32_param: Tensor, narrow_param: Tensor, master_bytewidth: int = 4) -> Tensor:
    """Error bits that turn a 16-bit parameter back into its fp32 master weight.

    Args:
        fp32_param: the master weight.
        narrow_param: bf16 or fp16, the master weight rounded to nearest. A tie rounded to even, as torch does, may
            leave the result off by one step of the error bits: 2^-16 or 2^-8 of the parameter's spacing.
        master_bytewidth: 3 for int8 error bits, 4 for int16.

    Raises:
        ValueError: for other dtypes, shapes that differ, or another width.
    """
    if fp32_param.dtype != torch.float32:
        raise ValueError(f"fp32_param is {fp32_param.dtype}; expected torch.float32.")
    if narrow_param.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"narrow_param is {narrow_param.dtype}; expected torch.bfloat16 or torch.float16.")
    if fp32_param.shape != narrow_param.shape:
        raise ValueError(f"Shapes differ: {tuple(fp32_param.shape)} and {tuple(narrow_param.shape)}.")
    if master_bytewidth not in (3, 4):
        raise ValueError(f"master_bytewidth={master_bytewidth}; expected 3 (24 bits) or 4 (32 bits).")
    error_dtype = torch.int8 if master_bytewidth == 3 else torch.int16
    return compute_error_bits(fp32_param.detach().contiguous(), narrow_param.detach().contiguous(), error_dtype)


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    selective: bool = True,
    full_precision_layers: Sequence[str | nn.Module] | None = None,
    full_precision_recast_layers: Sequence[str | nn.Module] | None = None,
) -> None:
    """Cast floating parameters and buffers in place; tensors that share memory go on sharing it.

    Layers kept in fp32 by name or reference cast their floating inputs to fp32 themselves.

    Args:
        model: the model.
        dtype: what to cast to.
        selective: keep normalization layers with running statistics in fp32.
        full_precision_layers: modules kept in fp32 whose output stays fp32 (heads): fnmatch patterns of full dotted
            names, or the modules.
        full_precision_recast_layers: the same, but their output is cast to ``dtype`` (layers in the middle).

    Raises:
        ValueError: if a pattern matches no module.
    """
    keep = _matching(model, full_precision_layers or ())
    recast = _matching(model, full_precision_recast_layers or ())
    kept_modules = {inner for module in (*keep, *recast) for inner in module.modules()}
    if selective:
        kept_modules.update(m for m in model.modules() if isinstance(m, NORMS_WITH_STATISTICS))
    kept = {id(t) for module in kept_modules for t in _own_tensors(module)}
    tensors = {id(t): t for module in model.modules() for t in _own_tensors(module) if t.is_floating_point()}
    sharing: dict[object, list[Tensor]] = {}
    for key, tensor in tensors.items():
        if key not in kept:
            sharing.setdefault(_memory_of(tensor), []).append(tensor)
    for group in sharing.values():
        _cast_together(group, dtype)
    for module in dict.fromkeys((*keep, *recast)):
        if not getattr(module, "_flashoptim_casts_inputs", False):
            module._flashoptim_casts_inputs = True
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        if module in recast and not getattr(module, "_flashoptim_casts_outputs", False):
            module._flashoptim_casts_outputs = True
            module.register_forward_hook(partial(_cast_output, dtype))


def _memory_of(tensor: Tensor) -> object:
    """The same for tensors that share memory, and for no others; without memory of its own, the tensor itself."""
    own = tensor.data
    if isinstance(own, DTensor) or own.is_meta or not own.numel():
        return id(tensor)
    return own.untyped_storage().data_ptr(), own.dtype


def _cast_together(tensors: list[Tensor], dtype: torch.dtype) -> None:
    """Cast tensors that share memory; those of several views become the same views of the memory cast as a whole."""
    first = tensors[0].data
    views = {(t.shape, t.stride(), t.storage_offset()) for t in tensors}
    if len(views) == 1:
        cast = first.to(dtype)
        for tensor in tensors:
            tensor.data = cast
        return
    whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).to(dtype)
    for tensor in tensors:
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _matching(model: nn.Module, specs: Sequence[str | nn.Module]) -> list[nn.Module]:
    found = []
    for spec in specs:
        matches = [
            module
            for name, module in model.named_modules()
            if module is spec or (isinstance(spec, str) and fnmatchcase(name, spec))
        ]
        if not matches:
            raise ValueError(
                f"No module matches {spec!r}. Patterns match full dotted names: use '*.head' for a nested module."
            )
        found.extend(matches)
    return found


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _cast_inputs(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return _cast_floating((args, kwargs), torch.float32)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: tuple, output: Any) -> Any:
    return _cast_floating(output, dtype)


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of nested tuples, lists and dicts, transformers' `ModelOutput` among them."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        cast = copy.copy(value)
        for key, item in value.items():
            cast[key] = _cast_floating(item, dtype)
        return cast
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_cast_floating(item, dtype) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_cast_floating(item, dtype) for item in value)
    return value
