"""Kernels of the step ops against the ops' CPU implementation: what may differ, and by how much.

Weights and moments differ by roundings in fp32 alone: the kernels take square roots and quotients by fast instructions
that err by up to 2 ULP, and the interpreter rounds every fused multiply-add twice. Where such a difference falls on the
boundary between two codes, two scales or two error bits, they differ by one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_flashoptim.ops.error_correction import reconstruct_master_weight
from tests.flashoptim.ops.step_inputs import clone

# Rows of whole groups in whole tiles and in others, of partial groups, of several dimensions, and none: few, for the
# interpreter.
SHAPES = [(8, 64), (9, 64), (5, 70), (4, 3, 3, 3), (0, 64)]
# Four roundings on the way to a code, each of 2^-24 of a number below 256, over the distance 1 between boundaries.
CODES_OFF = 4 * 256 * 2.0**-24
# fp32 roundings that the difference between two new weights, or two new moments, may come from.
ROUNDINGS = 8 * 2.0**-24


def on(device: torch.device, args: Sequence[object]) -> list[object]:
    """Copies of all tensors on a device, but for the learning rate, which stays on the CPU."""
    return [[t.to(device, copy=True) for t in a] if isinstance(a, list) else a for a in args]


def run_both(
    kernel: Callable[..., None], oracle: Callable[..., None], args: Sequence[object], device: torch.device
) -> tuple[list[object], list[object]]:
    """What the oracle and the kernel leave behind, both on the CPU."""
    expected, actual = clone(args), on(device, args)
    oracle(*expected)
    kernel(*actual)
    return expected, on(torch.device("cpu"), actual)


def masters(params: Sequence[Tensor], errors: Sequence[Tensor]) -> list[Tensor]:
    """Weights in fp64, from their error bits where there are any."""
    if not errors:
        return [p.double() for p in params]
    return [reconstruct_master_weight(p, e).double() for p, e in zip(params, errors, strict=True)]


def assert_weights_match(before: Sequence[Tensor], expected: Sequence[Tensor], actual: Sequence[Tensor], unit: float):
    """Weights (``masters``) differ by rounding of the update in fp32 and of the weight to ``unit``, its relative step."""
    for old, left, right in zip(before, expected, actual, strict=True):
        assert torch.equal(left.isfinite(), right.isfinite())
        known = left.isfinite()
        old, left, right = old[known], left[known], right[known]
        bound = ROUNDINGS * ((left - old).abs() + old.abs() * 2**-3) + unit * left.abs() + 2.0**-40
        assert ((left - right).abs() <= bound).all()


def assert_codes_match(expected: Sequence[Tensor], actual: Sequence[Tensor], groups_off: int) -> None:
    """Codes differ by at most one, and no more often than roundings and ``groups_off`` other scales explain."""
    off = numel = 0
    for left, right in zip(expected, actual, strict=True):
        difference = (left.int() - right.int()).abs()
        assert not difference.numel() or difference.max() <= 1
        off += int(difference.sum())
        numel += left.numel()
    assert off <= 3 + 2 * CODES_OFF * numel + 32 * groups_off


def assert_scales_match(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> int:
    """Scales differ by at most one bf16 step, at boundaries; returns how many do. Groups with NaN are the same."""
    off = numel = 0
    for left, right in zip(expected, actual, strict=True):
        assert torch.equal(left.isnan(), right.isnan())
        steps = (left.nan_to_num().view(torch.int16).int() - right.nan_to_num().view(torch.int16).int()).abs()
        assert not steps.numel() or steps.max() <= 1
        off += int(steps.sum())
        numel += left.numel()
    # A rounding of 2^-24 crosses a boundary between scales 2^-9 apart.
    assert off <= 3 + 8 * 2.0**-15 * numel
    return off


def assert_moments_match(
    expected: Sequence[Tensor], scales: Sequence[Tensor], actual: Sequence[Tensor], actual_scales: Sequence[Tensor]
) -> None:
    """fp32 moments to rounding of their largest operand, codes and scales as above, poisoned groups apart."""
    if scales:
        off = assert_scales_match(scales, actual_scales)
        clean = [not s.isnan().any() for s in scales]
        pairs = [(e, a) for e, a, c in zip(expected, actual, clean, strict=True) if c]
        assert_codes_match([e for e, _ in pairs], [a for _, a in pairs], off)
        return
    for left, right in zip(expected, actual, strict=True):
        largest = left[left.isfinite()].abs().max() if left.isfinite().any() else 0.0
        torch.testing.assert_close(left, right, rtol=0, atol=float(largest) * ROUNDINGS, equal_nan=True)
