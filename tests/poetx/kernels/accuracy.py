"""What the kernels are held to: the CPU operation in fp64 is the truth, the CPU operation in their dtype the yardstick."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter multiplies bf16 operands wrongly, so bf16 is tested on a GPU only.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def relative_error(found, truth) -> float:
    found, truth = found.cpu().double(), truth.cpu()
    return ((found - truth).norm() / truth.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


def assert_as_accurate(found, yardstick, truth, dtype) -> None:
    """At most twice the yardstick's error and one rounding unit of the dtype; NaN never passes."""
    assert found.shape == truth.shape
    allowed = 2 * relative_error(yardstick, truth) + torch.finfo(dtype).eps / 2
    error = relative_error(found, truth)
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"


def to(tensors, *args):
    """Move or cast the floating tensors of a sequence, and move the others."""
    return [t if t is None else t.to(*args) if t.is_floating_point() else t.to(args[0]) for t in tensors]
