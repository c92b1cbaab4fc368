"""The test of accuracy: 50 steps against AdamW in fp64, at every gradient scale, and two hard cases."""

import pytest
import torch
from torch import Tensor, nn

from hf_flashoptim import FlashAdamW, reconstruct_fp32_param
from hf_flashoptim.ops.companding import dequantize_second_moment

SHAPE = (64, 128)
STEPS = 50
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def total_updates(gradients: list[Tensor], dtype: torch.dtype, eps: float, **options: object) -> tuple[Tensor, Tensor]:
    """Sum of all updates of FlashAdamW and of AdamW in fp64, from 0, on the same gradients."""
    ours = nn.Parameter(torch.zeros(gradients[0].shape, dtype=dtype))
    truth = nn.Parameter(torch.zeros(gradients[0].shape, dtype=torch.float64))
    flash = FlashAdamW([ours], lr=1e-3, eps=eps, **options)
    reference = torch.optim.AdamW([truth], lr=1e-3, eps=eps)
    for gradient in gradients:
        ours.grad = gradient.to(dtype)
        truth.grad = ours.grad.double()
        flash.step()
        reference.step()
    errors = flash.state[ours].get("error_bits")
    master = ours.detach() if errors is None else reconstruct_fp32_param(ours, errors)
    return master.double(), truth.detach()


def noisy_gradients(magnitude: Tensor | float) -> list[Tensor]:
    fixed = torch.randn(SHAPE, dtype=torch.float64)
    return [magnitude * (fixed + torch.randn(SHAPE, dtype=torch.float64)) for _ in range(STEPS)]


@DTYPES
@pytest.mark.parametrize("scale", [1e-20, 1e-15, 1e-10, 1e-7, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e10])
def test_total_update_is_within_one_percent_of_adamw_at_every_gradient_scale(scale, dtype):
    ours, truth = total_updates(noisy_gradients(scale), dtype, eps=1e-15 if scale >= 1e-10 else 1e-30)
    assert (ours - truth).norm() / truth.norm() <= 0.01


@pytest.mark.parametrize("shape", [(40, 100), (64, 3, 3, 3), (700,)], ids=str)
def test_other_shapes_are_as_accurate(shape):
    fixed = torch.randn(shape, dtype=torch.float64)
    ours, truth = total_updates([fixed + torch.randn_like(fixed) for _ in range(STEPS)], torch.bfloat16, eps=1e-15)
    assert (ours - truth).norm() / truth.norm() <= 0.01


@DTYPES
@pytest.mark.parametrize("scale", [1e-7, 1.0])
def test_log_normal_magnitudes_within_a_group_keep_updates_bounded(scale, dtype):
    magnitude = scale * torch.randn(SHAPE, dtype=torch.float64).exp()
    ours, truth = total_updates(noisy_gradients(magnitude), dtype, eps=1e-15)
    assert ours.isfinite().all()
    assert ours.abs().max() <= 2 * truth.abs().max()
    assert (ours - truth).norm() / truth.norm() <= 0.1


@DTYPES
@pytest.mark.parametrize("scale", [1e-7, 1.0])
@pytest.mark.parametrize("zeros", ["other_elements_each_step", "the_same_elements"])
def test_half_of_all_gradients_zero_keeps_updates_bounded(scale, dtype, zeros):
    magnitude = scale * (2 * torch.randn(SHAPE, dtype=torch.float64)).exp()
    gradients = noisy_gradients(magnitude)
    keep = torch.rand(SHAPE) < 0.5
    for gradient in gradients:
        gradient *= keep if zeros == "the_same_elements" else torch.rand(SHAPE) < 0.5
    ours, truth = total_updates(gradients, dtype, eps=1e-15)
    assert ours.isfinite().all()
    assert ours.abs().max() <= 2 * truth.abs().max()
    assert not ours[truth == 0].any(), "what has no gradient does not move"


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_second_moment_follows_gradients_that_shrink_or_grow(factor):
    """At beta2 = 0.999 the root falls by at most an eighth of a code a step: less than rounding to nearest lets pass."""
    ours = nn.Parameter(torch.zeros(8, 64))
    truth = nn.Parameter(torch.zeros(8, 64, dtype=torch.float64))
    flash, reference = FlashAdamW([ours], lr=0.0, betas=(0.9, 0.999)), torch.optim.AdamW([truth], lr=0.0)
    for step in range(4000):
        ours.grad = torch.randn(8, 64) * (1.0 if step < 500 else factor)
        truth.grad = ours.grad.double()
        flash.step()
        reference.step()
    state = flash.state[ours]
    moment = dequantize_second_moment(state["exp_avg_sq_codes"], state["exp_avg_sq_scale"])
    ratio = (moment.double() / reference.state[truth]["exp_avg_sq"]).sqrt()
    # A root remembers some 1000 roundings, each off by 0.29 codes in the mean: 9 codes of about 200 if they were
    # independent, and a dither that fills the unit interval evenly does no worse. Rounding to nearest is off by 300%.
    assert abs(ratio.mean() - 1) <= 9 / 200
    assert (ratio - 1).abs().max() <= 4 * 9 / 200


def test_fp32_moments_differ_from_adamw_by_rounding_in_fp32_only():
    ours, truth = total_updates(noisy_gradients(1.0), torch.float32, eps=1e-15, quantize=False)
    # 50 steps, each of a dozen fp32 roundings of 2^-24, gathered at worst linearly.
    assert (ours - truth).norm() / truth.norm() <= STEPS * 12 * 2.0**-24
