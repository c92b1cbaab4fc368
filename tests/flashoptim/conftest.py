"""One thread: these tests are many small tensors, and pytest-xdist runs several processes already."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
