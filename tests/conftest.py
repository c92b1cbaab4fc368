"""Fixtures shared by all tests: no network, repeatable seeds, and where kernels run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = INTERPRETED or torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    """Kernel tests need a GPU or the interpreter; `make test` runs them in an interpreter process of their own."""
    if KERNELS_RUN:
        return
    for item in items:
        if "kernels" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="kernels need a GPU or TRITON_INTERPRET=1; `make test` sets it"))


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where kernel launchers run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state."""
    torch.manual_seed(0)
