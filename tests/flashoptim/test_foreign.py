"""State dicts of flashoptim 0.1.4: written by it on the CPU, and in its compressed form as it writes it on a GPU."""

import math
import warnings

import pytest
import torch
from torch import nn

import hf_flashoptim
from hf_flashoptim import reconstruct_fp32_param
from hf_flashoptim.ops.companding import decode_first_moment
from tests.flashoptim.models import set_gradients, small_model, train

flashoptim = pytest.importorskip("flashoptim", reason="the reference is not installed")

OPTIONS = {
    "FlashAdamW": {},
    "FlashAdam": {"weight_decay": 0.1},
    "FlashLion": {"weight_decay": 0.1},
    "FlashSGD": {"lr": 0.1, "momentum": 0.9},
    "FlashSGDW": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


def on_the_cpu(name, model, **options):
    """The only way that flashoptim runs on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = getattr(flashoptim, name)
        return cls(model.parameters(), quantize=False, master_weight_bits=None, fused=False, **options)


@pytest.mark.parametrize("name, options", OPTIONS.items(), ids=OPTIONS.keys())
def test_uncompressed_steps_and_state_dicts_agree(name, options):
    theirs, ours = small_model(torch.float32), small_model(torch.float32)
    reference = on_the_cpu(name, theirs, **options)
    optimizer = getattr(hf_flashoptim, name)(ours.parameters(), quantize=False, **options)
    train(theirs, reference, range(3))
    train(ours, optimizer, range(3))
    optimizer.load_state_dict(reference.state_dict())
    ours.load_state_dict(theirs.state_dict())
    train(theirs, reference, range(3, 6))
    train(ours, optimizer, range(3, 6))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert "master_bytewidth" not in optimizer.param_groups[0]


def flat_groups(values, limit, compand):
    """Codes and fp16 scales of the flattened tensor, in groups of 32 that run across rows."""
    padded = nn.functional.pad(values.reshape(-1), (0, -values.numel() % 32)).view(-1, 32)
    scales = padded.abs().amax(1).clamp(min=1e-12)
    x = padded / scales[:, None]
    codes = torch.floor((2 * x / (1 + x.abs()) if compand else x) * limit + 0.5)
    return codes.view(-1)[: values.numel()].view(values.shape), scales.half()


def compressed_state(p, bits):
    """Written out here from flashoptim's description of its format, independently of the loader."""
    mean = 1e-3 * torch.randn(p.shape)
    variance = (1e-3 * torch.randn(p.shape)).square()
    codes, scales = flat_groups(mean, 127.0, compand=True)
    root_codes, root_scales = flat_groups(variance.sqrt(), 255.0, compand=False)
    master = p.detach().double() * (1 + 2.0**-10 * torch.rand(p.shape, dtype=torch.float64))
    narrow = master.to(p.dtype)
    ulp = torch.exp2(torch.floor(narrow.double().abs().log2()) - (7 if p.dtype == torch.bfloat16 else 10))
    limit = 127 if bits == 24 else 32767
    errors = ((master - narrow.double()) / (ulp / 2) * limit).round().clamp(-limit, limit)
    errors = errors.to(p.dtype) if bits == 24 else errors.to(torch.int16).view(p.dtype)
    view = (lambda s: s.view(torch.bfloat16)) if p.dtype == torch.bfloat16 else (lambda s: s)
    state = {
        "step": torch.tensor(7),
        "exp_avg::quantized": codes.to(torch.int8),
        "exp_avg::scales": view(scales),
        "exp_avg_sq::quantized": root_codes.to(torch.uint8),
        "exp_avg_sq::scales": view(root_scales),
        "error_bits": errors,
    }
    return state, mean, variance, master, narrow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("shape", [(40, 64), (10, 70), (50,)], ids=str)
def test_compressed_state_loads(shape, dtype, bits):
    p = nn.Parameter(torch.randn(shape).to(dtype))
    state, mean, variance, master, narrow = compressed_state(p, bits)
    p.data.copy_(narrow)
    group = {"lr": 1e-4, "initial_lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    group |= {"master_bytewidth": bits // 8, "quantize": True, "params": [0]}
    optimizer = hf_flashoptim.FlashAdamW([p], master_weight_bits=bits)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    loaded = optimizer.state[p]
    assert loaded["step"] == 7 and optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    optimizer._compress_state_dict = False
    moments = optimizer.state_dict()["state"][0]
    # Two encodings of 8 bits each, of groups that need not be the same ones.
    torch.testing.assert_close(moments["exp_avg"], mean, rtol=0.02, atol=2 * mean.abs().max().item() / 127)
    root_limit = 1.5 * variance.sqrt().max().item() / 255
    torch.testing.assert_close(moments["exp_avg_sq"].sqrt(), variance.sqrt(), rtol=0.01, atol=root_limit)
    rebuilt = reconstruct_fp32_param(p, loaded["error_bits"]).double()
    step = 2.0 ** (math.floor(math.log2(master.abs().max())) - (7 if dtype == torch.bfloat16 else 10))
    fp32 = 2.0**-23 * master.abs().max()
    assert (rebuilt - master).abs().max() <= step / (100 if bits == 24 else 30000) + fp32


def test_codes_in_whole_groups_are_taken_over_as_they_are():
    p = nn.Parameter(torch.randn(8, 64).bfloat16())
    state, *_ = compressed_state(p, 24)
    decoded = decode_first_moment(
        state["exp_avg::quantized"].view(-1, 32), state["exp_avg::scales"].view(torch.float16).view(-1, 1)
    )
    group = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "master_bytewidth": 3, "params": [0]}
    optimizer = hf_flashoptim.FlashAdamW([p], quantize=False)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert torch.equal(optimizer.state[p]["exp_avg"], decoded.view(8, 64))


@pytest.mark.parametrize(
    "key, change",
    [
        ("exp_avg::scales", lambda t: t[:-1]),
        ("exp_avg_sq::quantized", lambda t: t[:-1]),
        ("exp_avg_sq::quantized", lambda t: t.int()),
        ("error_bits", lambda t: t[:-1]),
        ("error_bits", lambda t: t.int()),
    ],
    ids=["scales-short", "codes-short", "codes-dtype", "errors-short", "errors-dtype"],
)
def test_damaged_state_is_refused(key, change):
    p = nn.Parameter(torch.randn(8, 64).bfloat16())
    state, *_ = compressed_state(p, 24)
    state[key] = change(state[key])
    group = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "master_bytewidth": 3, "params": [0]}
    optimizer = hf_flashoptim.FlashAdamW([p])
    set_gradients(nn.ParameterList([p]), 0)
    optimizer.step()
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == 1
