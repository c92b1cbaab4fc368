"""Master weights come back from 16-bit parameters and error bits exactly as the format promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_flashoptim.ops.error_correction import compute_error_bits, reconstruct_master_weight, split_master_weight

PIECE = 1 << 22
FP16_MAX = 65504.0
NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
WIDTH = pytest.mark.parametrize("error_dtype", [torch.int8, torch.int16], ids=["24bit", "32bit"])


def floats_from(patterns: torch.Tensor) -> torch.Tensor:
    """fp32 numbers from int64 bit patterns."""
    return patterns.to(torch.int32).view(torch.float32)


def dense_sample(piece: int) -> torch.Tensor:
    """One pattern out of every 64 neighbours, so that all upper 26 bits occur: 2^26 patterns in 16 pieces."""
    upper = torch.arange(piece * PIECE, (piece + 1) * PIECE)
    return floats_from(upper * 64 + upper * 2654435761 % 64)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def check_bf16_32_bits(master: torch.Tensor) -> None:
    narrow, errors = split_master_weight(master, torch.bfloat16, torch.int16)
    rebuilt = reconstruct_master_weight(narrow, errors)
    same = bits(rebuilt) == bits(master)
    assert (same | master.isnan()).all(), "every finite number and inf come back exactly"
    assert torch.equal(narrow.isnan(), master.isnan()) and torch.equal(rebuilt.isnan(), master.isnan())


def test_every_finite_number_comes_back_from_bf16_and_16_error_bits_in_a_dense_sample():
    for piece in range(16):
        check_bf16_32_bits(dense_sample(piece))


@pytest.mark.slow
def test_every_finite_number_comes_back_from_bf16_and_16_error_bits():
    for start in range(0, 1 << 32, PIECE):
        check_bf16_32_bits(floats_from(torch.arange(start, start + PIECE)))


def check_bf16_24_bits(master: torch.Tensor) -> None:
    narrow, errors = split_master_weight(master, torch.bfloat16, torch.int8)
    rebuilt = reconstruct_master_weight(narrow, errors)
    assert torch.equal(narrow.isnan(), master.isnan()) and torch.equal(rebuilt.isnan(), master.isnan())
    assert torch.equal(rebuilt.isinf(), master.isinf()), "rounding to 24 bits never reaches inf"
    # In fp32 patterns ULP / 512 of bf16 is 2^16 / 512 = 128, and 255 where the last number below inf is truncated.
    distance = (bits(rebuilt).long() - bits(master).long()).abs()
    limit = torch.where(bits(master.abs()) > 0x7F7FFF80, 255, 128)
    assert ((distance <= limit) | master.isnan()).all()


def test_24_bits_are_within_a_512th_of_an_ulp_in_a_dense_sample():
    for piece in range(16):
        check_bf16_24_bits(dense_sample(piece))


@pytest.mark.slow
def test_24_bits_are_within_a_512th_of_an_ulp():
    for start in range(0, 1 << 32, PIECE):
        check_bf16_24_bits(floats_from(torch.arange(start, start + PIECE)))


def fp16_range(piece: int, pieces: int) -> torch.Tensor:
    """Numbers of both signs from 0 to just above fp16's range, densely: patterns with odd strides."""
    count = 1 << 20
    top = 0x47800000  # 65536
    patterns = torch.linspace(0, top, count, dtype=torch.float64).long() + piece * top // (count * pieces)
    return torch.cat([floats_from(patterns), -floats_from(patterns)])


def test_fp16_and_16_error_bits_are_exact_down_to_2_to_the_minus_17():
    for piece in range(4):
        master = fp16_range(piece, 4)
        rebuilt = reconstruct_master_weight(*split_master_weight(master, torch.float16, torch.int16))
        normal = (master.abs() >= 2.0**-17) & (master.abs() <= FP16_MAX)
        assert torch.equal(rebuilt[normal], master[normal])
        small = master.abs() < 2.0**-17
        assert (rebuilt[small].double() - master[small].double()).abs().max() <= 2.0**-41
        beyond = master.abs() > FP16_MAX
        assert (rebuilt[beyond].abs() == FP16_MAX).all(), "saturates"


def test_fp16_ties_are_exact():
    """Half-way between neighbours, where 16 signed bits reach only to one side."""
    patterns = torch.arange(0, 0x7BFF, dtype=torch.int16)
    below = patterns.view(torch.float16).float()
    above = (patterns + 1).view(torch.float16).float()
    for master in ((below + above) / 2, -(below + above) / 2):
        rebuilt = reconstruct_master_weight(*split_master_weight(master, torch.float16, torch.int16))
        assert torch.equal(rebuilt, master)


def test_fp16_and_8_error_bits_are_within_a_512th_of_an_ulp():
    for piece in range(4):
        master = fp16_range(piece, 4)
        master = master[master.abs() <= FP16_MAX]
        narrow, errors = split_master_weight(master, torch.float16, torch.int8)
        exponent = torch.frexp(narrow.float())[1].clamp(min=-13)
        ulp = torch.exp2((exponent - 11).double())
        assert ((reconstruct_master_weight(narrow, errors).double() - master.double()).abs() <= ulp / 512).all()


@NARROW
@WIDTH
def test_splitting_what_was_reconstructed_changes_no_bit(dtype, error_dtype):
    """A step that does not move a weight must not let it drift."""
    master = torch.cat([torch.randn(1 << 18) * scale for scale in (1e-6, 1e-3, 1.0, 1e3)])
    narrow, errors = split_master_weight(master, dtype, error_dtype)
    narrow_again, errors_again = split_master_weight(reconstruct_master_weight(narrow, errors), dtype, error_dtype)
    assert torch.equal(narrow, narrow_again) and torch.equal(errors, errors_again)


@NARROW
@WIDTH
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_non_finite_masters_stay_visible_in_the_parameter(dtype, error_dtype, value):
    master = torch.full((40,), value)
    master[::2] = 1.5
    narrow, errors = split_master_weight(master, dtype, error_dtype)
    torch.testing.assert_close(narrow.float(), master, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(reconstruct_master_weight(narrow, errors), master, equal_nan=True, rtol=0, atol=0)


def test_every_nan_pattern_stays_nan():
    patterns = torch.cat([0x7F800001 + torch.arange(1 << 15), 0x7FFFFFFF - torch.arange(1 << 17)])
    for sign in (0, 1 << 31):
        for error_dtype in (torch.int8, torch.int16):
            narrow, errors = split_master_weight(floats_from(patterns + sign), torch.bfloat16, error_dtype)
            assert narrow.isnan().all() and reconstruct_master_weight(narrow, errors).isnan().all()


def test_masters_beyond_bf16_have_an_infinite_parameter_and_come_back():
    master = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    narrow, errors = split_master_weight(master, torch.bfloat16, torch.int16)
    assert narrow.isinf().all()
    assert torch.equal(reconstruct_master_weight(narrow, errors), master)
    narrow, errors = split_master_weight(master, torch.bfloat16, torch.int8)
    assert narrow.isinf().all() and reconstruct_master_weight(narrow, errors).isfinite().all()


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf])
@WIDTH
def test_a_bf16_parameter_set_to_zero_or_inf_beside_stale_error_bits_does_not_become_nan(value, error_dtype):
    limits = torch.iinfo(error_dtype)
    errors = torch.arange(limits.min, limits.max + 1).to(error_dtype)
    rebuilt = reconstruct_master_weight(torch.full(errors.shape, value, dtype=torch.bfloat16), errors)
    assert not rebuilt.isnan().any()
    # Negative error bits beside inf are those of a finite number beyond bf16's largest.
    assert rebuilt[errors >= 0].isinf().all() if value else (rebuilt.abs() < torch.finfo(torch.bfloat16).tiny).all()


@NARROW
@WIDTH
def test_stale_error_bits_move_a_changed_parameter_by_at_most_half_an_ulp(dtype, error_dtype):
    narrow = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    narrow = narrow[narrow.isfinite()]
    limits = torch.iinfo(error_dtype)
    patterns = narrow.abs().view(torch.int16)
    ulp = ((patterns + 1).view(dtype).double() - patterns.view(dtype).double()).nan_to_num(0, torch.inf)
    for error in (limits.min, -1, 0, 1, limits.max):
        rebuilt = reconstruct_master_weight(narrow, torch.full(narrow.shape, error, dtype=error_dtype))
        assert rebuilt.isfinite().all()
        assert ((rebuilt.double() - narrow.double()).abs() <= ulp / 2).all()


@NARROW
@WIDTH
def test_error_bits_for_a_parameter_rounded_elsewhere_miss_by_at_most_one_step(dtype, error_dtype):
    """torch rounds ties to even; the positive half-way point lies one step outside what error bits can say."""
    below = torch.arange(0x3C00, 0x4000).to(torch.int16).view(dtype)
    master = (below.float() + (below.view(torch.int16) + 1).view(dtype).float()) / 2
    master = torch.cat([master, -master, torch.randn(1000)])
    narrow = master.to(dtype)
    rebuilt = reconstruct_master_weight(narrow, compute_error_bits(master, narrow, error_dtype))
    exponent = torch.frexp(narrow.float())[1]
    ulp = torch.exp2((exponent - (8 if dtype == torch.bfloat16 else 11)).float())
    step = ulp / (2 ** torch.iinfo(error_dtype).bits)
    assert ((rebuilt - master).abs() <= step).all()
    exact = (rebuilt == master).float().mean()
    assert error_dtype == torch.int8 or exact > 0.5


@given(
    st.floats(width=32), st.sampled_from([torch.int8, torch.int16]), st.sampled_from([torch.bfloat16, torch.float16])
)
def test_error_bits_never_make_a_finite_parameter_infinite(value, error_dtype, dtype):
    master = torch.tensor([value])
    narrow = master.to(dtype)
    rebuilt = reconstruct_master_weight(narrow, compute_error_bits(master, narrow, error_dtype))
    assert rebuilt.isfinite().all() or not narrow.isfinite().all()
