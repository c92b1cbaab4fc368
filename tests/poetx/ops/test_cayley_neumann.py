import pytest
import torch

from hf_poetx.ops.cayley import cayley, largest_singular_value
from hf_poetx.ops.cayley_neumann import cayley_neumann, cayley_neumann_backward
from hf_poetx.ops.skew import block_size, num_entries, pack_skew_gradient, unpack_skew


def random_entries(num_blocks: int, block: int, sigma: float, dtype=torch.float64) -> torch.Tensor:
    """Packed entries whose matrices all have the largest singular value sigma."""
    entries = torch.randn(num_blocks, num_entries(block), dtype=torch.float64)
    norms = torch.linalg.matrix_norm(unpack_skew(entries), 2)
    return (entries * (sigma / norms)[:, None]).to(dtype)


@pytest.mark.parametrize("block", [2, 3, 16, 33])
def test_unpacked_matrices_are_skew_symmetric_and_row_by_row(block):
    entries = torch.randn(3, num_entries(block))
    skew = unpack_skew(entries)
    assert torch.equal(skew, -skew.mT)
    rows, columns = torch.triu_indices(block, block, offset=1)
    assert torch.equal(skew[:, rows, columns], entries)
    assert block_size(entries) == block


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_count_of_entries_that_fits_no_matrix_is_an_error(count):
    with pytest.raises(ValueError, match=f"{count} packed entries"):
        block_size(torch.zeros(1, count))


@pytest.mark.parametrize("sigma", [0.05, 0.3, 0.9])
def test_defect_is_2s4_minus_s8(sigma):
    blocks = cayley_neumann(random_entries(4, 17, sigma), torch.float64)
    defect = torch.linalg.matrix_norm(blocks @ blocks.mT - torch.eye(17), 2)
    torch.testing.assert_close(defect, torch.full((4,), 2 * sigma**4 - sigma**8, dtype=torch.float64))


def test_polynomial_ends_in_q4_not_2q4():
    """The reference's CPU formula ends in 2Q^4, its kernel and the article in Q^4."""
    entries = random_entries(1, 8, 0.5)
    skew = unpack_skew(entries)
    identity = torch.eye(8, dtype=torch.float64)
    powers = [torch.linalg.matrix_power(skew, k) for k in range(5)]
    expected = identity + 2 * powers[1] + 2 * powers[2] + 2 * powers[3] + powers[4]
    torch.testing.assert_close(cayley_neumann(entries, torch.float64), expected)
    factored = (identity + skew) @ (identity + skew + powers[2] + powers[3])
    torch.testing.assert_close(cayley_neumann(entries, torch.float64), factored)


def test_exact_transform_is_orthogonal_and_has_the_sign_of_the_polynomial():
    entries = random_entries(4, 16, 0.3)
    exact, polynomial = cayley(entries), cayley_neumann(entries, torch.float64)
    torch.testing.assert_close(exact @ exact.mT, torch.eye(16, dtype=torch.float64).expand(4, -1, -1))
    distance = torch.linalg.matrix_norm(exact - polynomial, 2)
    # The series goes on with 2 Q^4 + 2 Q^5 + ..., of which the polynomial has one Q^4.
    assert (distance <= 0.3**4 + 2 * 0.3**5 / (1 - 0.3)).all()
    assert (torch.linalg.matrix_norm(exact.mT - polynomial, 2) > 1).all()


def test_gradient_matches_finite_differences():
    entries = random_entries(2, 6, 0.6).requires_grad_()
    assert torch.autograd.gradcheck(lambda e: cayley_neumann(e, torch.float64), entries)


def test_backward_formula_matches_autograd_through_the_polynomial():
    entries = random_entries(3, 9, 0.7).requires_grad_()
    gradient = torch.randn(3, 9, 9, dtype=torch.float64)
    skew = unpack_skew(entries)
    square = skew @ skew
    blocks = torch.eye(9) + 2 * (skew + square + square @ skew) + square @ square
    (expected,) = torch.autograd.grad(blocks, entries, gradient)
    torch.testing.assert_close(cayley_neumann_backward(gradient, entries.detach(), torch.float64), expected)
    torch.testing.assert_close(pack_skew_gradient(torch.autograd.grad((skew * gradient).sum(), skew)[0]),
                               pack_skew_gradient(gradient))  # fmt: skip


def test_zero_entries_give_the_identity_exactly():
    blocks = cayley_neumann(torch.zeros(2, num_entries(5)), torch.bfloat16)
    assert torch.equal(blocks, torch.eye(5, dtype=torch.bfloat16).expand(2, -1, -1))


def test_autocast_does_not_round_the_products():
    entries = random_entries(2, 32, 0.5, torch.float32)
    expected = cayley_neumann(entries, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cayley_neumann(entries, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_follow_the_rules_of_torch_library(dtype):
    entries = random_entries(2, 4, 0.5, torch.float32).requires_grad_()
    torch.library.opcheck(cayley_neumann, (entries, dtype))
    torch.library.opcheck(cayley_neumann_backward, (torch.randn(2, 4, 4), entries.detach(), dtype))


@pytest.mark.parametrize("sigma", [1e-6, 0.5])
def test_largest_singular_value_is_within_five_percent(sigma):
    entries = random_entries(8, 64, sigma, torch.float32)
    found = largest_singular_value(entries)
    assert (found <= sigma * 1.0001).all() and (found >= 0.95 * sigma).all()


def test_largest_singular_value_of_zero_is_zero_and_of_nan_is_nan():
    entries = torch.zeros(2, num_entries(4))
    entries[1, 0] = float("nan")
    found = largest_singular_value(entries)
    assert found[0] == 0 and found[1].isnan()
