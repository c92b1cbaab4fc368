"""8-bit moments: analytic error bounds, floors, saturation, and poison that stays in its group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flashoptim.ops import companding

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-7, 1.0, 1e6, 1e30])
def test_first_moment_error_is_within_the_companding_bound(magnitude):
    values = torch.randn(4096, 32).double().mul(magnitude).float()
    codes, scale = companding.encode_first_moment(values)
    decoded = companding.decode_first_moment(codes, scale)
    relative = (values / scale.float()).abs()
    # Half a step of 1/127 through the slope (1+|x|)^2 / 2 of the inverse is (1+|x|)^2 / 508 of the scale, to first
    # order; clamping where the scale was rounded down adds at most the scale's own rounding, 2^-9 of it.
    bound = 1.01 * (1 + relative) ** 2 / 508 + torch.where(relative > 1, 2.0**-8, 0.0)
    assert ((decoded - values).abs() <= bound * scale.float()).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-7, 1.0, 1e6, 1e30])
def test_second_moment_error_is_half_a_step_except_for_the_floor(magnitude):
    root = torch.randn(4096, 32).abs().double().mul(magnitude).float()
    codes, scale = companding.encode_second_moment(root)
    decoded = companding.decode_second_moment(codes, scale)
    step = scale.float() / 255
    floored = root < step / 2
    assert (codes[floored] == 1).all()
    assert (
        (decoded - root).abs()[~floored] <= (step * 0.501 + scale.float() * 2**-8 * (root > scale))[~floored]
    ).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=70))
def test_codes_stay_in_range_and_a_non_zero_second_moment_never_gets_code_0(values):
    tensor = torch.tensor([values])
    codes, scale = companding.encode_first_moment(tensor)
    assert scale.isfinite().all() and codes.abs().max() <= 127
    assert (codes.sign() * tensor.sign() >= 0).all()
    root = tensor.abs()
    codes, scale = companding.encode_second_moment(root)
    assert scale.isfinite().all()
    assert torch.equal(codes > 0, root > 0)
    assert companding.decode_second_moment(codes, scale).isfinite().all()


@given(st.integers(0, 255), st.floats(2.0**-126, 2.0**127, width=32))
def test_encoding_what_was_decoded_changes_no_code(code, scale):
    """So a moment that does not move does not drift."""
    scale = torch.tensor([[scale]]).bfloat16()
    codes = torch.full((1, 32), code, dtype=torch.uint8)
    codes[0, 0] = 255
    again, same = companding.encode_second_moment(companding.decode_second_moment(codes, scale))
    assert torch.equal(again, codes) and torch.equal(same, scale)
    signed = codes.int().sub(128).clamp(-127, 127).to(torch.int8)
    again, same = companding.encode_first_moment(companding.decode_first_moment(signed, scale))
    assert torch.equal(again, signed) and torch.equal(same, scale)


def test_scale_is_the_largest_magnitude_rounded_to_nearest_and_for_second_moments_up():
    values = torch.randn(256, 32)
    largest = values.abs().amax(1)
    _, scale = companding.encode_first_moment(values)
    assert torch.equal(scale[:, 0], largest.bfloat16())
    _, scale = companding.encode_second_moment(values.abs())
    above = scale[:, 0].float() / largest - 1
    assert (above >= -256 * 2.0**-23).all() and (above < 2.0**-7).all()


def test_mean_of_dithered_codes_is_the_value():
    root = torch.rand(16, 32) + 0.01
    decoded = [
        companding.decode_second_moment(*companding.encode_second_moment(root, companding.second_moment_dither(step)))
        for step in range(1, 1001)
    ]
    # Multiples of the golden ratio leave gaps of at most 1.2 / n in the unit interval: n = 1000, in codes of 1/255.
    assert (torch.stack(decoded).double().mean(0) - root).abs().max() <= 2 * 1.2 / 1000 * root.max() / 255


@pytest.mark.parametrize("value", [3.4e38, 1e-45, 1e-40], ids=str)
def test_scales_saturate_at_the_ends_of_the_normal_range(value):
    values = torch.full((1, 32), value)
    for encode in (companding.encode_first_moment, companding.encode_second_moment):
        scale = encode(values)[1].float()
        assert scale.isfinite().all() and (scale >= torch.finfo(torch.bfloat16).tiny).all()


def test_zero_decodes_to_zero_whatever_the_scale():
    zeros = torch.zeros(2, 40)
    assert not companding.decode_first_moment(*companding.encode_first_moment(zeros)).any()
    assert not companding.decode_second_moment(*companding.encode_second_moment(zeros)).any()
    unset = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert not companding.decode_second_moment(zeros.to(torch.uint8), unset).any()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_non_finite_values_poison_their_own_group_only(bad):
    values = torch.randn(3, 80)
    clean = companding.decode_first_moment(*companding.encode_first_moment(values))
    values[1, 40] = bad
    decoded = companding.decode_first_moment(*companding.encode_first_moment(values))
    assert decoded[1, 32:64].isnan().all()
    decoded[1, 32:64] = clean[1, 32:64]
    assert torch.equal(decoded, clean)
    root = companding.decode_second_moment(*companding.encode_second_moment(values.abs()))
    assert root[1, 32:64].isnan().all() and root.isnan().sum() == 32


@pytest.mark.parametrize("shape", [(7, 100), (4, 3, 5, 7), (2, 3, 40), (64, 3), (0, 40), (40, 0)], ids=str)
def test_tensors_of_any_shape_keep_it(shape):
    moment = torch.randn(shape)
    codes, scale = companding.quantize_first_moment(moment)
    assert codes.shape == moment.shape and codes.is_contiguous() and scale.is_contiguous()
    torch.testing.assert_close(companding.dequantize_first_moment(codes, scale), moment, atol=0.05, rtol=0.05)
    codes, scale = companding.quantize_second_moment(moment.square())
    torch.testing.assert_close(companding.dequantize_second_moment(codes, scale), moment.square(), atol=0.1, rtol=0.1)


def test_squares_saturate():
    square = companding.saturating_square(torch.tensor([1e30, 2.0, float("inf"), float("nan")]))
    assert square[0] == torch.finfo(torch.float32).max and square[1] == 4
    assert square[2].isinf() and square[3].isnan()
