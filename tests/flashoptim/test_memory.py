"""Temporary memory of a step on the CPU does not grow with the parameter."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource, sys, threading, time, torch
from hf_flashoptim import FlashAdamW
torch.set_num_threads(1)
page = resource.getpagesize()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * page
p = torch.nn.Parameter(torch.zeros(int(sys.argv[1]), 4096, dtype=torch.bfloat16))
p.grad = torch.ones_like(p)
optimizer = FlashAdamW([p])
optimizer.step()
before, highest, done = resident(), 0, False
def watch():
    global highest
    while not done:
        highest = max(highest, resident())
        time.sleep(1e-4)
thread = threading.Thread(target=watch)
thread.start()
optimizer.step()
done = True
thread.join()
print((highest - before) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_of_a_large_tensor_takes_at_most_16_mib_on_top():
    """In fp32 the tensor alone would take 128 MiB, and an unchunked step several times that."""
    # A fixed threshold makes glibc map and unmap every temporary, so that resident memory counts those alive and not
    # whatever pieces of its heap glibc happens to keep.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", CODE, "8192"], capture_output=True, text=True, check=True, env=environment
    )
    assert float(result.stdout) <= 16
