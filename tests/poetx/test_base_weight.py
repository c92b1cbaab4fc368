"""Fingerprints of base weights, and the bits that bfloat16 weights can be extended by."""

import pytest
import torch

from hf_poetx.base_weight import fingerprint, join_error_bits, split_error_bits


def test_fingerprint_is_the_same_in_the_precisions_that_hold_the_weight():
    weight = torch.randn(300, 40).bfloat16()
    assert fingerprint(weight) == fingerprint(weight.float()) == fingerprint(weight.double())


def test_fingerprint_depends_on_values_and_their_order():
    weight = torch.randn(50, 40)
    changed, flipped = weight.clone(), weight.flip(0)
    changed[7, 3] += 1
    prints = {int(fingerprint(w)) for w in (weight, changed, flipped, weight.mT.contiguous(), -weight)}
    assert len(prints) == 5 and min(prints) >= 0


def test_fingerprint_of_a_large_weight_reads_a_part_of_it_from_everywhere():
    weight = torch.zeros(1000, 1000)
    before = fingerprint(weight)
    weight[900:] += 1
    assert fingerprint(weight) != before


def test_split_weight_is_what_torch_rounds_to_and_joins_to_24_bits():
    special = torch.tensor([0.0, -0.0, 1.0, 3.0e38, -3.0e38, 1e-40])
    master = torch.cat((torch.randn(100_000), torch.randn(20_000) * 1e-30, special))
    narrow, bits = split_error_bits(master, torch.bfloat16)
    assert bits.dtype == torch.int8 and torch.equal(narrow, master.to(torch.bfloat16))
    error = (join_error_bits(narrow, bits).double() - master.double()).abs() / master.double().abs()
    # 24 bits hold 15 of the mantissa: half a unit of the last is 2^-16, and a whole one where a byte has no room.
    assert error.nan_to_num()[:-1].max() <= 2**-15
    assert (error > 2**-16).double().mean() < 2 / 256


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_split_to_even_as_torch_rounds_them(sign):
    """Up at every second one, down at the others, so that merges of many roundings have no direction."""
    neighbors = torch.arange(0x3F80, 0x4080, dtype=torch.int32)
    ties = sign * ((neighbors << 16) + 0x8000).view(torch.float32)
    narrow, bits = split_error_bits(ties, torch.bfloat16)
    assert torch.equal(narrow, ties.to(torch.bfloat16))
    assert (narrow.view(torch.int16) % 2 == 0).all() and set(bits.tolist()) == {-127, 127}
    again = split_error_bits(join_error_bits(narrow, bits), torch.bfloat16)
    assert torch.equal(again[0], narrow) and torch.equal(again[1], bits)


def test_splitting_a_joined_weight_changes_nothing():
    narrow, bits = split_error_bits(torch.randn(50_000), torch.bfloat16)
    again = split_error_bits(join_error_bits(narrow, bits), torch.bfloat16)
    assert torch.equal(again[0], narrow) and torch.equal(again[1], bits)


def test_only_bfloat16_weights_can_be_extended():
    with pytest.raises(ValueError, match=r"bfloat16 base weight, got torch.float16"):
        split_error_bits(torch.randn(4), torch.float16)
