"""Companding on the GPU against the CPU's."""

import pytest
import torch
import triton
import triton.language as tl

from hf_flashoptim.kernels import companding as kernels
from hf_flashoptim.ops import companding
from tests.conftest import INTERPRETED


@triton.jit
def _dither(steps, dithers, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(dithers + at, kernels.second_moment_dither(tl.load(steps + at)))


@triton.jit
def _round_trip(values, codes, scales, decoded, dither, GROUPS: tl.constexpr, SECOND: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    loaded = tl.load(values + at)
    if SECOND:
        unit, inverse = kernels.power_of_two(tl.max(loaded, axis=1))
        code, scale = kernels.encode_second_moment(loaded * inverse[:, None], unit, dither)
        tl.store(decoded + at, kernels.decode_second_moment(code, scale))
    else:
        code, scale = kernels.encode_first_moment(loaded)
        tl.store(decoded + at, kernels.decode_first_moment(code, scale))
    tl.store(codes + at, code)
    tl.store(scales + group, scale)


def round_trip(values, second, device, dither=0.0):
    """Codes, scales and decoded values of ``[groups, 32]``, groups being a multiple of 16."""
    values = values.to(device)
    codes = torch.empty(values.shape, dtype=torch.uint8 if second else torch.int8, device=device)
    scales, decoded = torch.empty(len(values), device=device), torch.empty_like(values)
    _round_trip[(len(values) // 16,)](
        values, codes, scales, decoded, dither, GROUPS=16, SECOND=second, num_warps=1, enable_fp_fusion=False
    )
    return codes.cpu(), scales.cpu(), decoded.cpu()


def hard_values():
    values = torch.randn(64, 32) * torch.logspace(-38, 38, 64).unsqueeze(1)
    values[3] = 0.0
    values[4, 1:] = 0.0
    values[5] = torch.logspace(-30, 0, 32)
    values[6, 0] = float("inf")
    values[7, 0] = float("nan")
    values[8] = torch.finfo(torch.float32).max
    values[9] = 1e-42
    values[10] = -1.0
    return values


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_codes_scales_and_values_equal_the_oracle(second, kernel_device):
    values = hard_values().abs() if second else hard_values()
    dither = 0.375 if second else 0.0
    decode = companding.decode_second_moment if second else companding.decode_first_moment
    if second:
        expected, scale = companding.encode_second_moment(values, dither)
    else:
        expected, scale = companding.encode_first_moment(values)
    codes, scales, decoded = round_trip(values, second, kernel_device, dither)
    assert torch.equal(scales.isnan(), scale.flatten().isnan())
    assert torch.equal(scales.nan_to_num(), scale.flatten().float().nan_to_num())
    clean = ~scales.isnan()
    # Fast reciprocals and the interpreter's unfused roundings may move a value over the boundary between two codes.
    difference = (codes.int() - expected.int()).abs()[clean]
    assert difference.max() <= 1 and difference.sum() <= 1
    own = decode(codes, scale)
    torch.testing.assert_close(decoded[clean], own[clean], rtol=2.0**-22, atol=0)
    assert decoded[~clean].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="fast reciprocals exist on a GPU alone")
def test_every_first_moment_code_equals_the_oracle(kernel_device):
    """All x from 2^-25 to 1 + 2^-8, the largest that a scale rounded down leaves: the scale is 1 in every group."""
    first, last = 0x33000000, 0x3F808000
    for start in range(first, last + 1, 31 << 20):
        bits = torch.arange(start, start + (31 << 20), device=kernel_device, dtype=torch.int32).clamp(max=last)
        x = torch.cat([bits.view(torch.float32).view(-1, 31), torch.ones(1 << 20, 1, device=kernel_device)], 1)
        codes, scales, _ = round_trip(x, False, kernel_device)
        assert (scales == 1).all()
        assert torch.equal(codes, companding.encode_first_moment(x)[0].cpu())


@pytest.mark.skipif(INTERPRETED, reason="fast reciprocals exist on a GPU alone")
def test_every_first_moment_decodes_to_the_bits_of_the_oracle(kernel_device):
    codes = torch.arange(-127, 128)
    values = companding.decode_first_moment(codes.to(torch.int8).view(1, -1), torch.ones(1, 8)).view(-1)
    rows = torch.ones(16 * 16, 32)
    rows[: len(values), 0] = values
    again, _, decoded = round_trip(rows, False, kernel_device)
    assert torch.equal(again[: len(values), 0].int(), codes.int())
    assert torch.equal(decoded[: len(values), 0], values)


def test_dither_of_every_step_is_exactly_the_oracles(kernel_device):
    steps = torch.cat([torch.arange(1.0, 513.0), 2.0**24 - torch.arange(512.0)])
    dithers = torch.empty(1024, device=kernel_device)
    _dither[(2,)](steps.to(kernel_device), dithers, COUNT=512)
    expected = [companding.second_moment_dither(step) for step in steps.tolist()]
    assert dithers.tolist() == expected and len(set(expected)) == 1024 and max(map(abs, expected)) < 0.5
