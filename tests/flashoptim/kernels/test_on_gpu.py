"""What only a GPU can show of the step kernels: no waiting, graphs, compilation, long tensors, memory."""

import pytest
import torch

from hf_flashoptim import FlashAdamW, enable_gradient_release, gradient_release
from hf_flashoptim.ops.adam import adam_step
from hf_flashoptim.ops.layout import scale_shape
from hf_flashoptim.ops.lion import lion_step
from tests.conftest import INTERPRETED
from tests.flashoptim.kernels.step_checks import on
from tests.flashoptim.ops.step_inputs import assert_same, clone
from tests.flashoptim.ops.test_adam import inputs

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


def gpu_inputs(device, **kwargs):
    return on(device, inputs(torch.bfloat16, torch.int8, True, shapes=[(64, 64), (5, 70)], **kwargs))


def test_a_step_never_waits_for_the_gpu(kernel_device):
    args = gpu_inputs(kernel_device)
    adam_step(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        args[8] = torch.tensor(2e-3)
        adam_step(*args)
        args[8] = torch.full((), 3e-3, device=kernel_device)
        adam_step(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_learning_rate_on_the_gpu_is_the_same(kernel_device):
    args = gpu_inputs(kernel_device, lr=0.5)
    other = clone(args)
    other[8] = torch.full((), 0.5, device=kernel_device)
    adam_step(*args)
    adam_step(*other)
    assert_same(args[:8], other[:8])


def test_a_captured_graph_counts_steps_and_follows_the_learning_rate(kernel_device):
    args = gpu_inputs(kernel_device)
    args[8] = torch.full((), 1e-3, device=kernel_device)
    eager = clone(args)
    adam_step(*clone(args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adam_step(*args)
    for lr in (1e-3, 5e-4, 2e-4):
        # Other steps in between use the memory that a step had, and other gradients.
        adam_step(*clone(args))
        args[8].fill_(lr)
        eager[8].fill_(lr)
        for mine, its in zip(args[1], eager[1], strict=True):
            its.copy_(mine.normal_())
        graph.replay()
        adam_step(*eager)
    assert_same(args[:8], eager[:8])


def test_gradients_may_move_between_steps(kernel_device):
    args = gpu_inputs(kernel_device)
    other = clone(args)
    for _ in range(3):
        adam_step(*args)
        other[1] = [g.clone() for g in other[1]]
        adam_step(*other)
    assert_same(args[:8], other[:8])


def test_a_compiled_training_step_is_the_same(kernel_device):
    args = gpu_inputs(kernel_device)
    eager = clone(args)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(*args):
        adam_step(*args)

    step(*args)
    adam_step(*eager)
    assert_same(args[:8], eager[:8])


@pytest.mark.parametrize("held", [0, 1 << 20, 1 << 40], ids=["nothing_waits", "some_wait", "all_wait"])
def test_gradients_of_several_streams_are_released_in_order(kernel_device, held, monkeypatch):
    monkeypatch.setattr(gradient_release, "gradient_bytes_to_hold", lambda params: held)
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512, device=kernel_device, dtype=torch.bfloat16) for _ in range(8)]
        model = torch.nn.Sequential(*layers)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2)
        if release:
            enable_gradient_release(model, optimizer)
        side = torch.cuda.Stream()
        for x in torch.randn(4, 64, 512, device=kernel_device, dtype=torch.bfloat16):
            x = model[:4](x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # these layers' backward runs here, too
                x = model[4:](x)
            torch.cuda.current_stream().wait_stream(side)
            x.square().mean().backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backward_notices_that_a_parameter_was_stepped(kernel_device):
    args = gpu_inputs(kernel_device)
    versions = [p._version for p in args[0]]
    adam_step(*args)
    assert all(p._version > version for p, version in zip(args[0], versions, strict=True))


def test_peak_memory_of_a_step_is_below_a_mebibyte(kernel_device):
    shapes = [(512, 512)] * 300
    args = on(kernel_device, inputs(torch.bfloat16, torch.int8, True, shapes=shapes))
    adam_step(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    adam_step(*args)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_elements_beyond_2_to_the_31_are_stepped(kernel_device):
    rows, cols = (1 << 25) + 2, 64
    tail = slice(rows - 4, rows)

    def zeros(dtype, shape=(rows, cols)):
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    grad = zeros(torch.bfloat16)
    grad[tail].normal_()
    scale = zeros(torch.bfloat16, scale_shape((rows, cols)))
    whole = [[zeros(torch.bfloat16)], [grad], [zeros(torch.int8)], [scale], [zeros(torch.int8)]]
    hyper = [torch.tensor(1e-3), 0.9, 0.99, 0.1, False]
    part = [[tensors[0][tail].clone()] for tensors in whole]
    lion_step(*whole, *hyper)
    lion_step(*part, *hyper)
    assert part[0][0].any()
    assert_same([[tensors[0][tail]] for tensors in whole], part)
