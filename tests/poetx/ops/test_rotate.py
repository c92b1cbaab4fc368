import pytest
import torch

from hf_poetx.ops.rotate import rotate, rotation_gradient

# (width, block): round, odd, one of SmolLM2's, one block alone, a tail of one column
WIDTHS = [(64, 16), (37, 8), (576, 256), (24, 24), (33, 16)]


def make(width, block, tokens=5, dtype=torch.float64):
    full, rest = divmod(width, block)
    x = torch.randn(tokens, width, dtype=dtype)
    blocks = torch.randn(full, block, block, dtype=dtype) / block**0.5
    tail = torch.randn(rest, rest, dtype=dtype) / rest**0.5 if rest > 1 else None
    return x, blocks, tail, torch.randperm(width, dtype=torch.int32)


def dense_rotation(blocks, tail, permutation):
    """The matrix that the operation never builds: P^T diag(blocks, tail) P."""
    width = permutation.numel()
    rest = width - blocks.shape[0] * blocks.shape[1]
    tail = torch.eye(rest, dtype=blocks.dtype) if tail is None else tail
    permute = torch.eye(width, dtype=blocks.dtype)[:, permutation.long()]
    return permute @ torch.block_diag(*blocks, tail) @ permute.T


@pytest.mark.parametrize("width, block", WIDTHS)
@pytest.mark.parametrize("transpose", [False, True])
def test_rotation_equals_the_dense_matrix(width, block, transpose):
    x, blocks, tail, permutation = make(width, block)
    bias = torch.randn(width, dtype=x.dtype)
    dense = dense_rotation(blocks, tail, permutation)
    expected = x @ (dense.T if transpose else dense) + bias
    torch.testing.assert_close(rotate(x, blocks, tail, permutation, 1, transpose, bias), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width, block", WIDTHS)
def test_a_half_precision_rotation_with_bias_rounds_once(width, block, dtype):
    x, blocks, tail, permutation = make(width, block, tokens=200)
    x, blocks, bias = x.to(dtype), blocks.to(dtype), torch.randn(width).to(dtype)
    tail = None if tail is None else tail.to(dtype)
    doubles = [None if t is None else t.double() for t in (x, blocks, tail)]
    truth = rotate(*doubles, permutation, 1, False, bias.double())
    found = rotate(x, blocks, tail, permutation, 1, False, bias)
    # Sums in fp32 move a value over a rounding boundary in one of 2^13 cases or fewer; a second rounding in one of 4.
    assert (found != truth.to(dtype)).double().mean() < 0.01


@pytest.mark.parametrize("width, block", WIDTHS)
def test_rotation_gradient_is_the_block_diagonal_of_the_dense_gradient(width, block):
    left, _, _, permutation = make(width, block)
    right = torch.randn_like(left)
    blocks, tail = rotation_gradient(left, right, permutation, 1, block)
    dense = (left.T @ right)[permutation.long()][:, permutation.long()]
    for k, found in enumerate(blocks):
        columns = slice(k * block, (k + 1) * block)
        torch.testing.assert_close(found, dense[columns, columns])
    torch.testing.assert_close(tail, dense[len(blocks) * block :, len(blocks) * block :])


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_match_finite_differences(transpose):
    x, blocks, tail, permutation = make(11, 4, tokens=3)
    bias = torch.randn(11, dtype=x.dtype)
    for tensor in (x, blocks, tail, bias):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, blocks, tail, bias: rotate(x, blocks, tail, permutation, 1, transpose, bias), (x, blocks, tail, bias)
    )


def test_no_tokens_give_no_tokens():
    x, blocks, tail, permutation = make(37, 8, tokens=0)
    assert rotate(x, blocks, tail, permutation, 1, False, None).shape == (0, 37)
    gradient, _ = rotation_gradient(x, x, permutation, 1, 8)
    assert gradient.abs().max() == 0


def test_operators_follow_the_rules_of_torch_library():
    x, blocks, tail, permutation = make(11, 4, dtype=torch.float32)
    x.requires_grad_(), blocks.requires_grad_(), tail.requires_grad_()
    torch.library.opcheck(rotate, (x, blocks, tail, permutation, 1, False, torch.randn(11)))
    torch.library.opcheck(rotation_gradient, (x.detach(), x.detach(), permutation, 1, 4))
