import pytest
import torch

from hf_poetx.ops import poetx_linear as ops
from hf_poetx.ops.dispatch import is_watched
from hf_poetx.ops.poetx_linear import poetx_linear
from hf_poetx.ops.rotation import Rotation
from hf_poetx.ops.skew import num_entries

# Activations rotated, or the weight.
both_ways = pytest.mark.parametrize("folded", [False, True], ids=["rotated", "folded"])


def make_rotation(width, block, dtype=torch.float64, scale=0.1):
    block = min(block, width)
    full, rest = divmod(width, block)
    entries = (scale * torch.randn(full, num_entries(block), dtype=dtype)).requires_grad_()
    tail = (scale * torch.randn(1, num_entries(rest), dtype=dtype)).requires_grad_() if rest > 1 else None
    return Rotation(entries, tail, torch.randperm(width, dtype=torch.int32), 1)


def make(in_features=11, out_features=14, block=4, dtype=torch.float64):
    x = torch.randn(2, 3, in_features, dtype=dtype, requires_grad=True)
    weight = torch.randn(out_features, in_features, dtype=dtype)
    bias = torch.randn(out_features, dtype=dtype, requires_grad=True)
    return x, weight, bias, make_rotation(in_features, block, dtype), make_rotation(out_features, block, dtype)


def flat_inputs(x, bias, *rotations):
    return [x, bias, *(t for r in rotations for t in (r.entries, r.tail) if t is not None)]


@both_ways
@pytest.mark.parametrize("memory_mode", ["fast", "mem"])
def test_layer_and_its_gradients_equal_the_composition_of_rotations(memory_mode, folded):
    x, weight, bias, rotation_in, rotation_out = make()
    composed = rotation_out.apply(rotation_in.apply(x) @ weight.T, bias=bias)
    result = poetx_linear(x, weight, bias, rotation_in, rotation_out, memory_mode, folded)
    torch.testing.assert_close(result, composed)
    gradient, inputs = torch.randn_like(result), flat_inputs(x, bias, rotation_in, rotation_out)
    expected = torch.autograd.grad(composed, inputs, gradient)
    for found, wanted in zip(torch.autograd.grad(result, inputs, gradient), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_effective_weight_is_g_out_t_w_g_in_t():
    """W_eff[p_out][:, p_in] = G_out^T W[p_out][:, p_in] G_in^T, the equation of the design."""
    x, weight, bias, rotation_in, rotation_out = make(12, 8, 4)
    p_in, p_out = rotation_in.permutation.long(), rotation_out.permutation.long()
    g_in, g_out = (torch.block_diag(*r.blocks(torch.float64)[0]) for r in (rotation_in, rotation_out))
    effective = torch.empty_like(weight)
    effective[p_out[:, None], p_in] = g_out.T @ weight[p_out][:, p_in] @ g_in.T
    torch.testing.assert_close(
        poetx_linear(x, weight, bias, rotation_in, rotation_out, "fast"), x @ effective.T + bias
    )


@pytest.mark.parametrize(
    "memory_mode, folded, extra",
    [("fast", False, 64 * 32), ("fast", True, 32 * 32), ("mem", False, 0), ("mem", True, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_activations_are_x_and_in_fast_mode_one_output_or_folded_weight(memory_mode, folded, extra, dtype):
    tokens, width = 64, 32
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(width, width)
    rotations = [make_rotation(width, 8, torch.float32) for _ in range(2)]
    owned = {t.data_ptr() for t in (x, weight, *(t for r in rotations for t in r[:3] if t is not None))}
    saved = {}
    pack = lambda t: saved.setdefault(t.data_ptr(), t) is None or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        poetx_linear(x, weight, None, *rotations, memory_mode, folded)
    assert x.data_ptr() in saved
    activations = [t for pointer, t in saved.items() if pointer not in owned]
    assert sum(t.numel() for t in activations) == extra


@both_ways
@pytest.mark.parametrize("frozen", [0, 1])
def test_no_gradient_work_for_what_needs_none(frozen, folded):
    x, weight, _, *rotations = make()
    rotations[frozen] = rotations[frozen]._replace(entries=rotations[frozen].entries.detach(), tail=None)
    result = poetx_linear(x.detach(), weight, None, *rotations, "fast", folded)
    result.square().sum().backward()
    assert rotations[1 - frozen].entries.grad.abs().sum() > 0


@both_ways
def test_result_may_be_changed_in_place(folded):
    x, weight, bias, rotation_in, rotation_out = make()
    poetx_linear(x, weight, bias, rotation_in, rotation_out, "fast", folded).add_(1).relu_().sum().backward()
    assert rotation_in.entries.grad is not None and x.grad.shape == x.shape


@both_ways
def test_autocast_does_not_reach_the_products(folded):
    inputs = *make(dtype=torch.float32), "mem", folded
    leaves = flat_inputs(inputs[0], *inputs[2:5])
    expected = poetx_linear(*inputs)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        result = poetx_linear(*inputs)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients, expected_gradients))


@pytest.mark.parametrize("needs", [[True] * 4, [False, True, False, True]], ids=str)
def test_operators_follow_the_rules_of_torch_library(needs):
    x, weight, bias, rotation_in, rotation_out = make(dtype=torch.float32)
    rotations = [t.detach() if isinstance(t, torch.Tensor) else t for t in (*rotation_in, *rotation_out)]
    x = x.detach().flatten(0, 1)
    torch.library.opcheck(torch.ops.poetx.linear.default, (x, weight, bias.detach(), *rotations))
    result, kept = torch.ops.poetx.linear(x, weight, None, *rotations)
    for saved in (kept, None):
        arguments = (torch.randn_like(result), x, saved, weight, *rotations, needs)
        torch.library.opcheck(torch.ops.poetx.linear_backward.default, arguments)


@both_ways
@pytest.mark.parametrize("memory_mode", ["fast", "mem"])
def test_full_graph_compile_gives_the_same_result(memory_mode, folded):
    x, weight, bias, rotation_in, rotation_out = make()
    compiled = torch.compile(poetx_linear, fullgraph=True, backend="aot_eager")
    inputs = flat_inputs(x, bias, rotation_in, rotation_out)
    outputs = [f(x, weight, bias, rotation_in, rotation_out, memory_mode, folded) for f in (poetx_linear, compiled)]
    torch.testing.assert_close(outputs[0], outputs[1])
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in outputs]
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_fake_tensors_on_a_gpu_go_through_the_operation_and_start_no_kernel():
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(6, 8), torch.empty(4, 8)
        permutations = torch.empty(8, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        rotations = (torch.empty(2, 6), None, permutations[0], 1, torch.empty(1, 6), None, permutations[1], 1)
        assert is_watched(x)
        result, kept = ops._linear(x, weight, None, *rotations)
    assert result.shape == (6, 4) and kept.shape == (24,) and result.device.type == "cuda"


@both_ways
def test_a_second_derivative_is_refused_rather_than_left_out(folded):
    x, weight, _, rotation_in, rotation_out = make()
    result = poetx_linear(x, weight, None, rotation_in, rotation_out, "fast", folded)
    (gradient,) = torch.autograd.grad(result.square().sum(), rotation_in.entries, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
