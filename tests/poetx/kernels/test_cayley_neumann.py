import pytest
import torch

from hf_poetx.ops.cayley_neumann import cayley_neumann as reference
from hf_poetx.ops.cayley_neumann import cayley_neumann_backward as reference_backward
from hf_poetx.ops.skew import num_entries
from tests.poetx.kernels.accuracy import DTYPES, assert_as_accurate

pytest.importorskip("triton")
from hf_poetx.kernels import cayley_neumann as kernels

# smallest, odd, round, over a power of two, a whole tile; then several tiles, on the GPU in and out of shared memory
BLOCKS = [2, 3, 16, 33, 64]
LARGE_BLOCKS = [190, 256, 512]


def make(block, num_blocks=(2, 3), sigma=0.3):
    """Packed entries of two rotations whose matrices have a largest singular value of about sigma."""
    return [sigma / (2 * block**0.5) * torch.randn(n, num_entries(block)) for n in num_blocks]


def transform(block, dtype, device, num_blocks):
    return kernels.Transform(num_blocks, block, dtype, device)


def check_forward(block, dtype, device, num_blocks=(2, 3)):
    entries = make(block, num_blocks)
    both = transform(block, dtype, device, num_blocks)
    found = both.blocks(both.unpack(*[each.to(device) for each in entries])).split(num_blocks)
    for blocks, each in zip(found, entries, strict=True):
        assert blocks.dtype == dtype
        assert_as_accurate(blocks, reference(each, dtype), reference(each.double(), torch.float64), dtype)


def check_backward(block, dtype, device, num_blocks=(2, 3)):
    entries = make(block, num_blocks)
    # The gradient of the blocks comes from activations of this dtype, so it is known to their precision.
    gradient = torch.randn(sum(num_blocks), block, block).to(dtype).float()
    on_device = [each.to(device) for each in entries]
    both = transform(block, dtype, device, num_blocks)
    found = both.gradient(both.unpack(*on_device), gradient.to(device), on_device)
    for packed, part, each in zip(found, gradient.split(num_blocks), entries, strict=True):
        truth = reference_backward(part.double(), each.double(), torch.float64)
        yardstick = reference_backward(part.to(dtype), each, dtype).to(dtype)
        assert packed.dtype == each.dtype
        assert_as_accurate(packed, yardstick, truth, dtype)


@pytest.fixture(params=["resident", "passes"])
def way(request, monkeypatch):
    """Q in Hopper's shared memory, or as on other GPUs a pass through memory for every product."""
    monkeypatch.setattr(kernels, "is_hopper", lambda device: request.param == "resident")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_two_rotations_in_one_launch_are_as_accurate_as_the_cpu(block, dtype, way, kernel_device):
    check_forward(block, dtype, kernel_device)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_two_rotations_are_as_accurate_as_the_cpu(block, dtype, way, kernel_device):
    check_backward(block, dtype, kernel_device)


@pytest.mark.parametrize("block", LARGE_BLOCKS)
def test_large_blocks_are_as_accurate_as_the_cpu(block, kernel_device, monkeypatch):
    if kernel_device.type == "cpu":
        monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
        if block > 256:
            pytest.skip("minutes in the interpreter, and the passes through memory are tested with smaller blocks")
    for dtype in DTYPES[1:]:
        check_forward(block, dtype, kernel_device, (1,))
        check_backward(block, dtype, kernel_device, (1,))


def test_zero_entries_give_the_identity_exactly(kernel_device):
    blocks = kernels.cayley_neumann(torch.zeros(2, num_entries(24), device=kernel_device), torch.float16)
    assert torch.equal(blocks.cpu(), torch.eye(24, dtype=torch.float16).expand(2, -1, -1))


def test_half_precision_entries_give_half_precision_gradients(kernel_device):
    entries = make(16)[0].half().to(kernel_device)
    gradient = torch.randn(2, 16, 16, device=kernel_device)
    packed = kernels.cayley_neumann_backward(gradient, entries, torch.float16)
    assert packed.dtype == torch.float16
    truth = reference_backward(gradient.cpu().double(), entries.cpu().double(), torch.float64)
    assert_as_accurate(packed, truth.half(), truth, torch.float16)


def test_double_precision_is_refused_by_name(kernel_device):
    with pytest.raises(TypeError, match=r"float64.*cast"):
        kernels.cayley_neumann(make(4)[0].to(kernel_device), torch.float64)
