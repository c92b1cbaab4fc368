import pytest
import torch

from hf_poetx.ops.rotate import rotate as reference
from hf_poetx.ops.rotate import rotation_gradient as reference_gradient
from tests.poetx.kernels.accuracy import DTYPES, INTERPRETED, assert_as_accurate, to

pytest.importorskip("triton")
from hf_poetx.kernels import rotate as kernels

# width, block, permutation group, tokens: vectors, single columns, tails, a tail of one column, one block, odd sizes
SHAPES = [
    (128, 32, 16, 20),
    (128, 32, 1, 20),
    (96, 64, 16, 33),
    (37, 8, 1, 5),
    (33, 16, 1, 3),
    (24, 24, 8, 70),
    (130, 20, 2, 1),
]
if not INTERPRETED:  # the tiles of real models, which the interpreter takes minutes for
    SHAPES += [(1024, 256, 16, 200), (1024, 256, 1, 200), (1100, 256, 4, 130), (2048, 512, 32, 100)]


def make(width, block, group, tokens, dtype):
    full, rest = divmod(width, block)
    x = torch.randn(tokens, width)
    blocks = torch.randn(full, block, block) / block**0.5
    tail = torch.randn(rest, rest) / rest**0.5 if rest > 1 else None
    permutation = (torch.randperm(width // group)[:, None] * group + torch.arange(group)).flatten().int()
    return [*to((x, blocks, tail), dtype), permutation]


def nan_filled(*shape, **options):
    return torch.full(torch.Size(shape[0] if isinstance(shape[0], tuple) else shape), float("nan"), **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_as_accurate_as_the_cpu(shape, transpose, dtype, kernel_device):
    x, blocks, tail, permutation = make(*shape, dtype)
    bias = torch.randn(shape[0]).to(dtype)
    arguments = (shape[2], transpose)
    found = kernels.rotate(*to((x, blocks, tail, permutation), kernel_device), *arguments, bias.to(kernel_device))
    yardstick = reference(x, blocks, tail, permutation, *arguments, bias)
    truth = reference(*to((x, blocks, tail), torch.float64), permutation, *arguments, bias.double())
    assert found.is_contiguous() and found.dtype == dtype
    assert_as_accurate(found, yardstick, truth, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_blocks_is_as_accurate_as_the_cpu(shape, dtype, kernel_device):
    left, *_, permutation = make(*shape, dtype)
    right = torch.randn_like(left)
    _, block, group, _ = shape
    found = kernels.rotation_gradient(*to((left, right, permutation), kernel_device), group, block)
    truth = reference_gradient(left.double(), right.double(), permutation, group, block)
    yardstick = reference_gradient(left, right, permutation, group, block)
    for each, measure, expected in zip(found, yardstick, truth, strict=True):
        assert each.dtype == torch.float32
        assert_as_accurate(each, measure, expected, dtype)


def test_gradient_split_over_tokens_equals_the_unsplit_one(kernel_device, monkeypatch):
    left, _, _, permutation = make(40, 16, 8, 200, torch.float32)
    right = torch.randn_like(left)
    monkeypatch.setattr(kernels, "_split", lambda *arguments: (3, 96))
    gradients = kernels.Gradients((40,), 200, 16, (8,), True, torch.float32, kernel_device, "ieee")
    found = gradients(to((left, right, permutation), kernel_device))
    for each, expected in zip(found, reference_gradient(left, right, permutation, 8, 16), strict=True):
        torch.testing.assert_close(each.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("groups", [(16, 16), (1, 1), (8, 16)], ids=str)
def test_gradients_of_two_rotations_in_one_launch_equal_those_apart(groups, kernel_device):
    rotations, expected = [], []
    for width, group in zip((96, 64), groups, strict=True):
        left, *_, permutation = to(make(width, 32, group, 50, torch.float32), kernel_device)
        right = torch.randn_like(left)
        expected.append(reference_gradient(left.cpu(), right.cpu(), permutation.cpu(), group, 32)[0])
        store = kernels.with_contiguous_columns if group == 1 else kernels.with_contiguous_rows
        rotations.append((store(left), store(right), permutation))
    gradients = kernels.Gradients((96, 64), 50, 32, groups, groups[0] > 1, torch.float32, kernel_device, "ieee")
    found, _ = gradients(*rotations)
    torch.testing.assert_close(found.cpu(), torch.cat(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("programs, tokens", [(4, 0), (4, 100), (4, 100_000), (128, 100_000), (500, 8192)])
def test_splits_cover_all_tokens_and_none_is_empty(programs, tokens):
    splits, tokens_per_split = kernels._split(programs, tokens, 64, 132)
    assert splits * tokens_per_split >= tokens
    assert tokens == 0 or (splits - 1) * tokens_per_split < tokens


@pytest.mark.parametrize("group", [1, 16])
def test_no_tokens_give_no_tokens_and_no_gradient(group, kernel_device):
    x, blocks, tail, permutation = make(96, 32, group, 0, torch.float32)
    inputs = to((x, blocks, tail, permutation), kernel_device)
    assert kernels.rotate(*inputs, group, False, None).shape == (0, 96)
    gradient, _ = kernels.rotation_gradient(inputs[0], inputs[0], inputs[3], group, 32)
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("group", [1, 16])
def test_every_element_is_written(group, kernel_device, monkeypatch):
    x, blocks, tail, permutation = to(make(96, 64, group, 33, torch.float32), kernel_device)
    monkeypatch.setattr(torch, "empty", nan_filled)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, float("nan")))
    assert not kernels.rotate(x, blocks, tail, permutation, group, False, None).isnan().any()
    for gradient in kernels.rotation_gradient(x, x, permutation, group, 64):
        assert not gradient.isnan().any()


def test_misaligned_and_strided_inputs_give_the_same_result(kernel_device):
    x, blocks, tail, permutation = to(make(64, 32, 16, 9, torch.float32), kernel_device)
    expected = kernels.rotate(x, blocks, tail, permutation, 16, False, None)
    shifted = torch.empty(x.numel() + 1, device=kernel_device)[1:].view_as(x).copy_(x)
    strided = torch.empty(9, 128, device=kernel_device)[:, ::2].copy_(x)
    for same in (shifted, strided, x.t().contiguous().t()):
        torch.testing.assert_close(kernels.rotate(same, blocks, tail, permutation, 16, False, None), expected)


def test_a_permutation_of_single_columns_works_on_column_major_activations(kernel_device):
    x = torch.randn(16, 64, device=kernel_device)
    columns = kernels.with_contiguous_columns(x)
    assert columns.stride() == (1, 16) and torch.equal(columns, x)
    assert kernels.with_contiguous_columns(columns) is columns
    assert torch.equal(kernels.with_contiguous_rows(columns), x)
    assert not kernels.moves_vectors(torch.bfloat16, 1, 32, 64)
    assert kernels.moves_vectors(torch.bfloat16, 16, 32, 64) and not kernels.moves_vectors(torch.bfloat16, 16, 20, 60)


def test_double_precision_is_refused_by_name(kernel_device):
    x, blocks, tail, permutation = make(16, 8, 1, 2, torch.float64)
    with pytest.raises(TypeError, match=r"float64.*cast"):
        kernels.rotate(*to((x, blocks, tail, permutation), kernel_device), 1, False, None)
