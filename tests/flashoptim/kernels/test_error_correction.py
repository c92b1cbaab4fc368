"""Error bits on the GPU against the CPU's: the same bits."""

import pytest
import torch
import triton
import triton.language as tl

from hf_flashoptim.kernels.launch import TRITON_DTYPES
from hf_flashoptim.kernels.storage import master_weight, store_weight
from hf_flashoptim.ops import error_correction


@triton.jit
def _split_and_join(masters, narrow, errors, joined, DTYPE: tl.constexpr, ERROR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < at + 1
    store_weight(narrow + at, errors + at, exists, tl.load(masters + at), DTYPE, ERROR)
    tl.debug_barrier()
    tl.store(joined + at, master_weight(tl.load(narrow + at), tl.load(errors + at), DTYPE, ERROR))


def hard_masters():
    """Every exponent with mantissas at the boundaries between parameters, and what is not a number."""
    exponents = torch.arange(256, dtype=torch.int32).view(-1, 1) << 23
    mantissas = torch.tensor(
        [
            0,
            1,
            0x7F,
            0x80,
            0x81,
            0x7FFF,
            0x8000,
            0x8001,
            0xFFFF,
            0x7F7FFF,
            0x7FFF7F,
            0x7FFF80,
            0x7FFFFF,
            0x17FFF,
            0x5000,
        ]
    )
    random = torch.randint(0, 1 << 23, (17,))
    bits = (exponents | torch.cat([mantissas, random]).int().view(1, -1)).flatten()
    masters = torch.cat([bits, bits | -0x80000000]).view(torch.float32)
    # Kernels split what they have computed, and arithmetic makes no other NaN.
    return masters.masked_fill(masters.isnan(), float("nan"))


@pytest.mark.parametrize("error_dtype", [torch.int8, torch.int16], ids=["24bit", "32bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_split_and_join_equal_the_oracle(dtype, error_dtype, kernel_device):
    masters = hard_masters()
    expected_narrow, expected_errors = error_correction.split_master_weight(masters, dtype, error_dtype)
    stored = torch.int16 if dtype == torch.bfloat16 else dtype
    on_device = masters.to(kernel_device)
    narrow = torch.empty(masters.shape, dtype=stored, device=kernel_device)
    errors = torch.empty(masters.shape, dtype=error_dtype, device=kernel_device)
    joined = torch.empty_like(on_device)
    dtypes = TRITON_DTYPES
    _split_and_join[(len(masters) // 1024,)](
        on_device, narrow, errors, joined, DTYPE=dtypes[dtype], ERROR=dtypes[error_dtype], BLOCK=1024, num_warps=1
    )
    narrow = narrow.cpu().view(dtype)
    assert torch.equal(narrow.isnan(), expected_narrow.isnan())
    known = ~narrow.isnan()
    assert torch.equal(narrow.view(torch.int16)[known], expected_narrow.view(torch.int16)[known])
    assert torch.equal(errors.cpu(), expected_errors)
    expected = error_correction.reconstruct_master_weight(expected_narrow, expected_errors)
    torch.testing.assert_close(joined.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_a_parameter_set_to_zero_or_inf_beside_stale_error_bits_does_not_become_nan(value, kernel_device):
    narrow = torch.full((1024,), value, dtype=torch.bfloat16)
    errors = torch.arange(-512, 512).clamp(-128, 127).to(torch.int8)
    joined = torch.empty(1024, device=kernel_device)
    _join[(1,)](
        narrow.view(torch.int16).to(kernel_device),
        errors.to(kernel_device),
        joined,
        DTYPE=tl.bfloat16,
        ERROR=tl.int8,
        BLOCK=1024,
    )
    expected = error_correction.reconstruct_master_weight(narrow, errors)
    assert torch.equal(joined.cpu().view(torch.int32), expected.view(torch.int32))


@triton.jit
def _join(narrow, errors, joined, DTYPE: tl.constexpr, ERROR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(joined + at, master_weight(tl.load(narrow + at), tl.load(errors + at), DTYPE, ERROR))
