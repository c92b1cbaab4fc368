"""State dicts: bit-exact resuming, interchange with torch.optim, and refusals that change nothing."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from hf_flashoptim import FlashAdam, FlashAdamW, FlashLion, FlashSGD, cast_model, reconstruct_fp32_param
from tests.flashoptim.models import ALL, assert_bit_equal, mixed_model, set_gradients, small_model, tensors_of, train

EACH = pytest.mark.parametrize("cls, options", ALL.values(), ids=ALL.keys())


def through_a_file(state_dict):
    """What another process would read."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@EACH
@pytest.mark.parametrize("bits", [24, 32])
def test_resuming_is_bitwise_equal_with_all_dtypes_mixed(cls, options, bits):
    through, resumed = mixed_model(), mixed_model(seed=1)
    optimizer = cls(through.parameters(), master_weight_bits=bits, **options)
    train(through, optimizer, range(3))
    saved = through_a_file({"model": through.state_dict(), "optimizer": optimizer.state_dict()})
    train(through, optimizer, range(3, 6))
    other = cls(resumed.parameters(), master_weight_bits=bits, **options)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, range(3, 6))
    assert_bit_equal(tensors_of(through, optimizer), tensors_of(resumed, other))


@EACH
def test_loading_copies(cls, options):
    model = small_model()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    other = cls(model.parameters(), **options)
    other.load_state_dict(state_dict)
    before = tensors_of(model, other)
    train(model, optimizer, range(2, 4))
    for name, tensor in tensors_of(model, other).items():
        if name not in dict(model.named_parameters()):
            assert torch.equal(tensor, before[name])


def test_compressed_state_dict_takes_5_bytes_a_parameter_with_the_weight():
    model = nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16)
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(1))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    per_parameter = len(buffer.getvalue()) / model.weight.numel()
    assert 5 <= per_parameter < 5 + 4 / 32 + 0.02  # one bf16 scale for 32 codes of each moment, and the file's index


@EACH
def test_state_survives_safetensors(cls, options, tmp_path):
    model = mixed_model()
    optimizer = cls(model.parameters(), master_weight_bits=32, **options)
    train(model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    flat = {f"{index}.{key}": t for index, s in state_dict["state"].items() for key, t in s.items()}
    save_file({key: value.contiguous() for key, value in flat.items()}, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    states = {index: {key: loaded[f"{index}.{key}"] for key in state} for index, state in state_dict["state"].items()}
    other = cls(model.parameters(), master_weight_bits=32, **options)
    other.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
    assert_bit_equal(tensors_of(model, optimizer), tensors_of(model, other))


def test_state_dicts_hold_plain_tensors_and_numbers():
    model = mixed_model()
    optimizer = FlashAdamW(model.parameters(), master_weight_bits=32)
    train(model, optimizer, range(1))
    for state in optimizer.state_dict()["state"].values():
        assert all(type(value) is torch.Tensor for value in state.values())
        assert not {"exp_avg", "exp_avg_sq"} & set(state) or state["exp_avg"].dtype == torch.float32


PAIRS = pytest.mark.parametrize(
    "cls, reference, options",
    [
        (FlashAdamW, torch.optim.AdamW, {}),
        (FlashAdam, torch.optim.Adam, {"weight_decay": 0.1}),
        (FlashSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (FlashSGD, torch.optim.SGD, {"lr": 0.1}),
    ],
    ids=["adamw", "adam", "sgd", "sgd_without_momentum"],
)


@PAIRS
def test_torch_loads_an_uncompressed_state_dict_and_goes_on(cls, reference, options):
    ours = small_model(torch.float32)
    optimizer = cls(ours.parameters(), compress_state_dict=False, **options)
    train(ours, optimizer, range(3))
    theirs = copy.deepcopy(ours)
    other = reference(theirs.parameters(), **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    train(ours, optimizer, range(3, 5))
    train(theirs, other, range(3, 5))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        # The moments' rounding moves an update by a few percent, and two updates were made.
        torch.testing.assert_close(p, q, rtol=0, atol=0.2 * optimizer.param_groups[0]["lr"])


def test_torch_refuses_codes_instead_of_taking_them_for_moments():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(1))
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    set_gradients(model, 0)
    with pytest.raises(KeyError):
        other.step()


@PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_torch_state_dict_loads_and_training_goes_on(cls, reference, options, dtype):
    theirs = small_model(dtype)
    other = reference(theirs.parameters(), **options)
    train(theirs, other, range(3))
    ours = copy.deepcopy(theirs)
    optimizer = cls(ours.parameters(), **options)
    optimizer.load_state_dict(through_a_file(other.state_dict()))
    train(theirs, other, range(3, 5))
    train(ours, optimizer, range(3, 5))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        lr = optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(p, q, rtol=0 if dtype == torch.float32 else 2.0**-7, atol=0.2 * lr)
    if options.get("momentum") != 0 and "step" in other.state[theirs[2].weight]:
        assert optimizer.state[ours[2].weight]["step"] == 5
    assert not {"foreach", "fused", "amsgrad", "capturable"} & set(optimizer.param_groups[0])


def test_an_untouched_learning_rate_group_gets_its_initial_rate_from_torch():
    model = small_model()
    other = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["reference_lr"] == 3e-4


def test_loading_shares_no_learning_rate_with_what_was_loaded():
    model = small_model()
    first, second = (FlashAdamW(model.parameters(), lr=torch.tensor(1e-3)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["lr"].fill_(0.5)
    assert float(first.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_error_bits_that_find_no_place_are_dropped_with_a_warning():
    model = small_model().bfloat16()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(2))
    wide = copy.deepcopy(model).float()
    with pytest.warns(UserWarning, match="get_fp32_model_state_dict"):
        FlashAdamW(wide.parameters()).load_state_dict(optimizer.state_dict())


def test_unknown_names_among_fp32_weights_are_named():
    model = small_model().bfloat16()
    optimizer = FlashAdamW(model.parameters())
    weights = optimizer.get_fp32_model_state_dict(model)
    with pytest.warns(UserWarning, match="module.stranger"):
        optimizer.set_fp32_model_state_dict(model, weights | {"module.stranger": torch.zeros(2)})


def test_going_through_torch_and_back_drops_error_bits_with_a_warning():
    model = small_model()
    optimizer = FlashAdamW(model.parameters(), compress_state_dict=False, master_weight_bits=32)
    train(model, optimizer, range(2))
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    train(model, other, range(2, 3))
    with pytest.warns(UserWarning, match="Error bits"):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state[model[2].weight]["error_bits"].any()


@pytest.mark.parametrize("old", [{"master_weight_bits": 24}, {"master_weight_bits": 32}, {"quantize": False}], ids=str)
@pytest.mark.parametrize("new", [{"master_weight_bits": 24}, {"master_weight_bits": 32}, {"quantize": False}], ids=str)
def test_formats_may_change_on_resuming(old, new):
    model = small_model()
    optimizer = FlashAdamW(model.parameters(), **old)
    train(model, optimizer, range(3))
    other = FlashAdamW(model.parameters(), **new)
    other.load_state_dict(optimizer.state_dict())
    p = model[2].weight
    before = reconstruct_fp32_param(p, optimizer.state[p]["error_bits"])
    after = reconstruct_fp32_param(p, other.state[p]["error_bits"])
    # Where 32 bits become 24, at most one step of 8 error bits: ULP / 256 of bf16.
    torch.testing.assert_close(before, after, rtol=2.0**-15, atol=0)
    assert ("exp_avg" in other.state[p]) == (new.get("quantize") is False)
    assert other.param_groups[0]["quantize"] is new.get("quantize", True)
    train(model, other, range(1))


def test_an_empty_state_dict_loads_and_hooks_run():
    """accelerate loads a fresh optimizer's own state dict as soon as it is prepared."""
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    order = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: order.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda o: order.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1))
    assert order == ["before", "after"]


def test_named_parameters_keep_their_names():
    model = small_model()
    optimizer = FlashAdamW(model.named_parameters())
    train(model, optimizer, range(1))
    other = FlashAdamW(model.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def damage(key, change):
    """Change one state tensor of the second matrix."""

    def apply(state_dict):
        state = state_dict["state"][2]
        state[key] = change(state[key])

    return apply


DAMAGES = {
    "a missing moment": (lambda d: d["state"][2].pop("exp_avg_codes"), "exp_avg_codes"),
    "missing scales": (lambda d: d["state"][2].pop("exp_avg_sq_scale"), "exp_avg_sq_scale"),
    "a missing step": (lambda d: d["state"][2].pop("step"), "step"),
    "a cut tensor": (damage("exp_avg_codes", lambda t: t[:-1]), r"shape \(69, 128\); expected \(70, 128\)"),
    "cut scales": (damage("exp_avg_scale", lambda t: t[:, :1]), "exp_avg_scale"),
    "another dtype": (damage("exp_avg_codes", lambda t: t.float()), "torch.float32; expected torch.int8"),
    "rounded scales": (damage("exp_avg_scale", lambda t: t.half()), "torch.float16"),
    "negative scales": (damage("exp_avg_scale", lambda t: -t), "negative"),
    "error bits of another shape": (damage("error_bits", lambda t: t.T), "error_bits"),
    "error bits of another dtype": (damage("error_bits", lambda t: t.int()), "error_bits"),
    "a negative step": (damage("step", lambda t: t - 10), "step"),
    "a step that is NaN": (damage("step", lambda t: t * float("nan")), "step"),
    "something that is no tensor": (damage("exp_avg_codes", lambda t: "codes"), "str; expected a tensor"),
    "state of another optimizer": (lambda d: d["state"][2].update(max_exp_avg_sq=torch.zeros(2)), "max_exp_avg_sq"),
    "state of a parameter that is not there": (lambda d: d["state"].update({99: d["state"][2]}), "99"),
    "a group too many": (lambda d: d["param_groups"].append(d["param_groups"][0]), "groups of"),
    "a parameter too few": (lambda d: d["param_groups"][0]["params"].pop(), "groups of"),
    "no groups": (lambda d: d.pop("param_groups"), "param_groups"),
    "amsgrad": (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad"),
    "a hyperparameter out of range": (lambda d: d["param_groups"][0].update(betas=(0.9, 2.0)), "betas"),
}


@pytest.mark.parametrize("apply, named", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_state_dict_is_named_and_changes_nothing(apply, named):
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(2))
    damaged = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 3))
    before = tensors_of(model, optimizer)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    apply(damaged)
    with pytest.raises(ValueError, match=named):
        optimizer.load_state_dict(damaged)
    assert_bit_equal(tensors_of(model, optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups
    train(model, optimizer, range(3, 4))


@pytest.mark.parametrize("cls, other", [(FlashAdamW, FlashSGD), (FlashSGD, FlashLion), (FlashLion, FlashAdamW)])
def test_state_of_another_optimizer_is_refused(cls, other):
    model = small_model()
    source = other(model.parameters(), **({"momentum": 0.9} if other is FlashSGD else {}))
    train(model, source, range(1))
    with pytest.raises(ValueError, match=r"cannot be loaded"):
        cls(model.parameters()).load_state_dict(source.state_dict())


def test_a_truncated_file_leaves_the_optimizer_as_it_was(tmp_path):
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(1))
    path = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = tensors_of(model, optimizer)
    with pytest.raises((RuntimeError, OSError)):
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    assert_bit_equal(tensors_of(model, optimizer), before)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=2).flatmap(
        lambda lead: st.integers(0, 80).map(lambda last: (*lead, last))
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    name=st.sampled_from(sorted(ALL)),
    bits=st.sampled_from([24, 32]),
    compress=st.booleans(),
)
def test_state_of_any_shape_comes_back(shape, dtype, name, bits, compress):
    cls, options = ALL[name]
    options = options if dtype == torch.float32 else {**options, "master_weight_bits": bits}
    p = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = cls([p], compress_state_dict=compress, **options)
    p.grad = torch.randn(shape).to(dtype)
    optimizer.step()
    other = cls([p], **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    if compress:
        assert_bit_equal(optimizer.state[p], other.state[p])
        return
    # Uncompressed moments are encoded a second time, which may change the scale by a step of bf16.
    other._compress_state_dict = False
    for state, loaded in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        for key, value in state.items():
            size = value.float().abs().max().item() if value.numel() else 0.0
            torch.testing.assert_close(
                loaded[key], value, rtol=0, atol=0.02 * size if "exp" in key or "mom" in key else 0
            )


def test_non_finite_state_comes_back_too():
    p = nn.Parameter(torch.randn(4, 64))
    optimizer = FlashAdamW([p])
    p.grad = torch.randn(4, 64)
    p.grad[0, 0] = float("nan")
    optimizer.step()
    other = FlashAdamW([p])
    other.load_state_dict(optimizer.state_dict())
    assert_bit_equal(optimizer.state[p], other.state[p])


@pytest.mark.parametrize("bits", [24, 32])
def test_fp32_weights_go_out_and_come_back(bits):
    model = small_model()
    optimizer = FlashAdamW(model.parameters(), master_weight_bits=bits)
    train(model, optimizer, range(3))
    weights = through_a_file(optimizer.get_fp32_model_state_dict(model))
    assert all(w.dtype == torch.float32 for w in weights.values())
    assert any(not torch.equal(w, p.float()) for w, p in zip(weights.values(), model.parameters(), strict=True))
    before = tensors_of(model, optimizer)
    fresh = small_model(seed=1)
    other = FlashAdamW(fresh.parameters(), master_weight_bits=bits)
    other.set_fp32_model_state_dict(fresh, weights)
    for name, p in fresh.named_parameters():
        assert torch.equal(p, before[name])
        assert torch.equal(other.state[p]["error_bits"], before[f"{name}.error_bits"]), "before any step"
    again = other.get_fp32_model_state_dict(fresh)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_fp32_weights_hold_buffers_and_leave_integers_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    cast_model(model)
    optimizer = FlashAdamW(model.parameters())
    weights = optimizer.get_fp32_model_state_dict(model)
    assert weights["1.num_batches_tracked"].dtype == torch.int64
    weights["1.running_mean"] = torch.ones(4)
    optimizer.set_fp32_model_state_dict(model, weights)
    assert model[1].running_mean.eq(1).all()


@pytest.mark.parametrize(
    "weights, named",
    [
        ({"0.weight": torch.zeros(8, 3, 3, 3), "2.weight": torch.zeros(70, 128).bfloat16()}, "bfloat16"),
        ({"0.weight": torch.zeros(8, 3, 3, 3), "2.weight": torch.zeros(70, 127)}, "shape"),
        ({"transformer.weight": torch.zeros(2)}, "transformer.weight"),
    ],
    ids=["dtype", "shape", "names"],
)
def test_fp32_weights_that_do_not_fit_change_nothing(weights, named):
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=named):
        optimizer.set_fp32_model_state_dict(model, weights)
    assert_bit_equal({name: p.detach() for name, p in model.named_parameters()}, before)
