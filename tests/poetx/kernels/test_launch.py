import gc

import pytest
import torch

from tests.poetx.kernels.accuracy import INTERPRETED

pytest.importorskip("triton")
from hf_poetx.kernels.rotate import _transpose_kernel, _transpose_plan


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_plan_outlives_the_kernel_cache_of_triton(kernel_device):
    x = torch.randn(48, 80, device=kernel_device, dtype=torch.bfloat16)
    plan = _transpose_plan(x.shape, x.dtype, x.device)
    plan(x, torch.empty(80, 48, device=kernel_device, dtype=x.dtype))
    _transpose_kernel.device_caches.clear()
    gc.collect()
    out = torch.full((80, 48), float("nan"), device=kernel_device, dtype=x.dtype)
    plan(x, out)
    assert torch.equal(out, x.T)
