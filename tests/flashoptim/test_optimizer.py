"""What all optimizers share: groups, mixed dtypes, awkward parameters, schedules, reset, and steps of one parameter."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_flashoptim import (
    FlashAdam,
    FlashAdamW,
    FlashLion,
    FlashSGD,
    FlashSGDW,
    NumericsError,
    cast_model,
    reconstruct_fp32_param,
)
from tests.flashoptim.models import ALL, assert_bit_equal, mixed_model, set_gradients, small_model, tensors_of, train
from tests.versions import needs

EACH = pytest.mark.parametrize("cls, options", ALL.values(), ids=ALL.keys())


def reference_for(cls, options):
    """The torch optimizer with the same meaning, if there is one."""
    if cls in (FlashAdam, FlashAdamW):
        return torch.optim.Adam if cls is FlashAdam else torch.optim.AdamW
    return torch.optim.SGD if cls is FlashSGD else None


@pytest.mark.parametrize(
    "cls, options",
    [
        (FlashAdamW, {"weight_decay": 0.1}),
        (FlashAdamW, {"maximize": True}),
        (FlashAdam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
        (FlashSGD, {"lr": 0.1}),
        (FlashSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        (FlashSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ],
    ids=str,
)
def test_without_compression_it_is_torchs_optimizer(cls, options):
    ours, theirs = small_model(torch.float32), small_model(torch.float64)
    theirs.load_state_dict(ours.state_dict())
    flash = cls(ours.parameters(), quantize=False, **options)
    reference = reference_for(cls, options)(theirs.parameters(), **options)
    for step in range(10):
        set_gradients(ours, step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = p.grad.double()
        flash.step()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [FlashAdamW, FlashSGDW, FlashLion])
def test_decoupled_learning_rate_scales_decay_by_the_schedule_only(cls):
    p = nn.Parameter(torch.ones(4, 64))
    optimizer = cls([p], lr=1e-2, weight_decay=1e-3, decouple_lr=True)
    optimizer.param_groups[0]["lr"] = 5e-3
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - 0.5e-3), rtol=1e-6, atol=0)


def test_every_group_starts_its_schedule_from_its_own_rate():
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = FlashAdamW([{"params": [first]}, {"params": [second], "lr": 5e-4}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert scheduler.base_lrs == [1e-2, 5e-4]


def test_a_rate_set_before_the_schedule_is_what_it_starts_from():
    optimizer = FlashAdamW([nn.Parameter(torch.zeros(2, 2))], lr=1e-3)
    optimizer.param_groups[0]["lr"] = 1e-2
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_decoupled_decay_at_the_rate_of_the_construction_is_weight_decay_under_a_schedule_with_another_start():
    p = nn.Parameter(torch.ones(4, 64))
    optimizer = FlashAdamW([p], lr=1e-3, weight_decay=1e-2, decouple_lr=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)
    p.grad = torch.zeros_like(p)
    rates = []
    for _ in range(9):
        before = p.detach().clone()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        # A difference of numbers near 1 has an error of 2^-24.
        torch.testing.assert_close(
            1 - p / before, torch.full_like(p, 1e-2 * rates[-1] / 1e-3), rtol=1e-3, atol=2.0**-23
        )
        schedule.step()
    assert max(rates) == pytest.approx(1e-3)


@pytest.mark.parametrize("bits", [24, 32])
def test_a_model_cast_on_the_way_gets_error_bits(bits):
    model = nn.Linear(64, 64, bias=False)
    optimizer = FlashAdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    optimizer.param_groups[0]["master_weight_bits"] = bits
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.bfloat16()
    start = model.weight.detach().float()
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert optimizer.state[model.weight]["error_bits"].dtype == {24: torch.int8, 32: torch.int16}[bits]
    # A bf16 weight of 0.1 alone is 2^-11 from the next one and would stay where it is. With 24 bits that becomes 2^-19,
    # and a step of 1e-5 is rounded to multiples of it.
    moved = start - optimizer.get_fp32_model_state_dict(model)["weight"]
    assert moved.mean().item() == pytest.approx(50 * 1e-5, rel=2.0**-20 / 1e-5)


def test_a_model_cast_back_to_fp32_drops_its_error_bits_with_a_warning_and_steps_on():
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = FlashAdamW(model.parameters(), lr=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.float()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match="its error bits are dropped"):
        optimizer.step()
    assert "error_bits" not in optimizer.state[model.weight]


def test_another_width_of_master_weights_keeps_what_error_bits_hold():
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = FlashAdamW(model.parameters(), lr=1e-4)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    before = optimizer.get_fp32_model_state_dict(model)["weight"]
    optimizer.param_groups[0].update(master_weight_bits=32, lr=0.0)
    optimizer.step()
    assert optimizer.state[model.weight]["error_bits"].dtype == torch.int16
    assert torch.equal(optimizer.get_fp32_model_state_dict(model)["weight"], before)


def test_a_refused_gradient_is_refused_before_any_parameter_is_stepped():
    first, second = nn.Parameter(torch.ones(4, 32)), nn.Parameter(torch.ones(4, 32))
    optimizer = FlashAdamW([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones_like(first), torch.ones(4, 32).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert torch.equal(first, torch.ones_like(first)) and not optimizer.state


@EACH
def test_mixed_dtypes_in_one_optimizer_step_like_optimizers_of_their_own(cls, options):
    together, apart = mixed_model(), mixed_model()
    optimizer = cls(together.parameters(), **options)
    train(together, optimizer, range(3))
    singles = [cls([p], **options) for p in apart.parameters()]
    for step in range(3):
        set_gradients(apart, step)
        for single in singles:
            single.step()
    for p, q in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(p, q)
    for p in together.parameters():
        assert ("error_bits" in optimizer.state[p]) == (p.dtype != torch.float32)


def test_groups_override_quantize_and_master_weight_bits():
    a, b, c = (nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16)) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b], "quantize": False}, {"params": [c], "master_weight_bits": 32}]
    optimizer = FlashAdamW(groups)
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[a]["exp_avg_codes"].dtype == torch.int8
    assert optimizer.state[b]["exp_avg"].dtype == torch.float32 and "exp_avg_codes" not in optimizer.state[b]
    assert [optimizer.state[p]["error_bits"].dtype for p in (a, b, c)] == [torch.int8, torch.int8, torch.int16]


@pytest.mark.parametrize("bits, bytes_per_parameter", [(24, 5), (32, 6), (None, 4)])
@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
def test_bytes_per_parameter(bits, bytes_per_parameter):
    p = nn.Parameter(torch.zeros(512, 1024, dtype=torch.bfloat16))
    optimizer = FlashAdamW([p], master_weight_bits=bits)
    p.grad = torch.ones_like(p)
    optimizer.step()
    total = sum(t.nbytes for t in optimizer.state[p].values()) + p.nbytes
    # One bf16 scale for 32 codes of each moment, and the step counter.
    assert total == p.numel() * bytes_per_parameter + 2 * 2 * p.numel() // 32 + 4


def test_vectors_and_scalars_keep_fp32_moments():
    parameters = [nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(()))]
    optimizer = FlashAdamW(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in parameters:
        assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.float32


@EACH
def test_a_parameter_without_gradient_is_left_alone_and_gets_no_state(cls, options):
    model = small_model()
    optimizer = cls(model.parameters(), **options)
    frozen = model[2].weight
    before = frozen.detach().clone()
    set_gradients(model, 0)
    frozen.grad = None
    optimizer.step()
    assert torch.equal(frozen, before) and not optimizer.state.get(frozen)
    train(model, optimizer, range(1))
    assert not torch.equal(frozen, before)


def test_requires_grad_may_change_on_the_way():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters())
    x = torch.randn(4, 3, 6, 6)
    for trainable in (True, False, True):
        model[2].weight.requires_grad_(trainable)
        before = model[2].weight.detach().clone()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[2].weight, before) != trainable
    assert optimizer.state[model[2].weight]["step"] == 2


@EACH
def test_empty_parameters_step(cls, options):
    p = nn.Parameter(torch.zeros(0, 64))
    optimizer = cls([p], **options)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_non_contiguous_parameters_and_gradients_step_like_contiguous_ones(cls, options, dtype):
    plain = nn.Parameter(torch.randn(40, 64).to(dtype))
    transposed = nn.Parameter(plain.detach().T.contiguous().T)
    assert not transposed.is_contiguous()
    optimizers = [cls([p], **options) for p in (plain, transposed)]
    for _ in range(3):
        gradient = torch.randn(40, 64).to(dtype)
        plain.grad, transposed.grad = gradient, gradient.T.contiguous().T
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, transposed) and not transposed.is_contiguous()


def test_channels_last_parameters_step():
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    other = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    for m in (model, other):
        train(m, FlashAdamW(m.parameters()), range(3))
    assert torch.equal(model.weight, other.weight)


def test_tied_parameters_are_stepped_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(2))
    assert model.head.weight is model.embed.weight and optimizer.state[model.embed.weight]["step"] == 2
    weights = optimizer.get_fp32_model_state_dict(model)
    assert torch.equal(weights["head.weight"], weights["embed.weight"])


def test_closures_are_evaluated_with_gradients_on():
    model = small_model(torch.float32)
    optimizer = FlashAdamW(model.parameters())
    x = torch.randn(2, 3, 6, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(5):
        last = optimizer.step(closure)
    assert last < first


def test_sparse_and_complex_are_refused():
    embedding = nn.Embedding(10, 32, sparse=True)
    optimizer = FlashAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="complex64"):
        FlashAdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="float64"):
        FlashAdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))])


@pytest.mark.parametrize(
    "cls, options, named",
    [
        (FlashAdamW, {"lr": -1.0}, "lr=-1.0"),
        (FlashAdamW, {"lr": float("nan")}, "lr=nan"),
        (FlashAdamW, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        (FlashAdamW, {"eps": -1e-8}, "eps=-1e-08"),
        (FlashAdamW, {"weight_decay": -0.1}, "weight_decay=-0.1"),
        (FlashAdamW, {"master_weight_bits": 16}, "master_weight_bits=16"),
        (FlashAdamW, {"lr": 0.0, "decouple_lr": True}, "decouple_lr"),
        (FlashLion, {"betas": (1.5, 0.9)}, r"betas\[0\]=1.5"),
        (FlashSGD, {"momentum": -0.1}, "momentum=-0.1"),
        (FlashSGD, {"nesterov": True}, "nesterov"),
    ],
    ids=str,
)
def test_hyperparameters_out_of_range_are_named_also_in_a_group(cls, options, named):
    with pytest.raises(ValueError, match=named):
        cls(small_model().parameters(), **options)
    optimizer = cls([nn.Parameter(torch.zeros(2, 2))])
    group_options = {key: value for key, value in options.items()}
    with pytest.raises(ValueError, match=named):
        optimizer.add_param_group({"params": list(small_model().parameters()), **group_options})
    assert len(optimizer.param_groups) == 1, "the refused group is not kept"


def test_default_master_bits_are_ignored_for_fp32_but_a_demand_is_an_error():
    model = small_model(torch.float32)
    FlashAdamW(model.parameters())
    for bits in (24, 32):
        with pytest.raises(ValueError, match=f"master_weight_bits={bits} has no effect"):
            FlashAdamW(model.parameters(), master_weight_bits=bits)
    FlashAdamW(mixed_model().parameters(), master_weight_bits=32)
    with pytest.warns(UserWarning, match="without error bits"):
        FlashAdamW(small_model().parameters(), master_weight_bits=None)


@pytest.mark.parametrize("fused", [True, False])
def test_fused_and_eager_steps_agree(fused):
    model = small_model()
    optimizer = FlashAdamW(model.parameters(), fused=fused)
    train(model, optimizer, range(3))
    other = small_model()
    other_optimizer = FlashAdamW(other.parameters())
    train(other, other_optimizer, range(3))
    assert_bit_equal(tensors_of(model, optimizer), tensors_of(other, other_optimizer))


def test_sgd_without_momentum_keeps_no_state():
    model = small_model(torch.float32)
    optimizer = FlashSGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    assert not optimizer.state and not optimizer.state_dict()["state"]


def test_learning_rate_may_be_a_tensor():
    ours, other = small_model(), small_model()
    tensor_lr = FlashAdamW(ours.parameters(), lr=torch.tensor(1e-3, dtype=torch.float64))
    float_lr = FlashAdamW(other.parameters(), lr=1e-3)
    for optimizer, model in ((tensor_lr, ours), (float_lr, other)):
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert isinstance(tensor_lr.param_groups[0]["lr"], torch.Tensor)
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=1e-6)


@EACH
def test_reset_state_starts_exactly_these_parameters_anew(cls, options):
    model = small_model()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(3))
    chosen = [model[2].weight, model[2].bias]
    kept = {p: {k: t.clone() for k, t in optimizer.state[p].items()} for p in model.parameters()}
    places = {p: {k: t.data_ptr() for k, t in optimizer.state[p].items()} for p in chosen}
    optimizer.reset_state(iter(chosen))
    for p in model.parameters():
        state = optimizer.state[p]
        if any(p is q for q in chosen):
            fresh = optimizer.initial_state(p, optimizer.param_groups[0])
            assert_bit_equal(state, fresh)
            assert places[p] == {k: t.data_ptr() for k, t in state.items()}, "in place"
        else:
            assert_bit_equal(state, kept[p])


def test_reset_state_refuses_a_stranger_before_it_resets_any():
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match="does not belong"):
        optimizer.reset_state([model[2].weight, nn.Parameter(torch.zeros(2))])
    assert optimizer.state[model[2].weight]["step"] == 1


@EACH
def test_step_param_is_the_step_of_one_parameter(cls, options):
    whole, single = small_model(), small_model()
    optimizers = [cls(m.parameters(), **options) for m in (whole, single)]
    for step in range(2):
        set_gradients(whole, step)
        set_gradients(single, step)
        optimizers[0].step()
        for p in single.parameters():
            optimizers[1].step_param(p)
    assert_bit_equal(tensors_of(whole, optimizers[0]), tensors_of(single, optimizers[1]))


@EACH
def test_learning_rate_0_changes_no_weight(cls, options):
    model = small_model()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(2))
    before = {n: t for n, t in tensors_of(model, optimizer).items() if n.count(".") == 1 or n.endswith("error_bits")}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2, 4))
    assert_bit_equal(before, {n: t for n, t in tensors_of(model, optimizer).items() if n in before})


def test_momentum_may_be_turned_on_on_the_way():
    model = small_model()
    optimizer = FlashSGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(1))
    assert set(optimizer.state[model[2].weight]) == {"error_bits"}
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, range(2))
    assert "momentum_buffer_codes" in optimizer.state[model[2].weight]


def test_copies_and_pickles_step_on():
    model = small_model()
    optimizer = FlashAdamW(model.parameters(), compress_state_dict=False)
    train(model, optimizer, range(2))
    both = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 4))
    train(*both, range(2, 4))
    assert_bit_equal(tensors_of(model, optimizer), tensors_of(*both))
    assert "exp_avg" in both[1].state_dict()["state"][2]


@pytest.mark.parametrize("cls", [FlashAdamW, FlashLion])
def test_check_numerics_raises_when_the_rate_cannot_change_the_largest_weights(cls):
    p = nn.Parameter(torch.full((4, 64), 100.0, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = cls([p], lr=1e-7, check_numerics=True)
    with pytest.raises(NumericsError, match="master_weight_bits=32"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()


@pytest.mark.parametrize(
    "dtype, bits", [(torch.bfloat16, None), (torch.bfloat16, 24), (torch.float16, 24), (torch.float32, None)]
)
@pytest.mark.filterwarnings("ignore:master_weight_bits=None")
def test_the_numerics_check_is_sharp(dtype, bits):
    """Just above the threshold a sign step moves the weight; just below it does not."""
    options = {} if bits is None and dtype == torch.float32 else {"master_weight_bits": bits}
    mantissa = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype] + (8 if bits else 0)
    threshold = 2.0 ** (1 - mantissa - 1)
    for lr, moves in ((threshold * 1.1, True), (threshold * 0.9, False)):
        p = nn.Parameter(torch.full((1, 32), 3.0, dtype=dtype))
        p.grad = -torch.ones_like(p)
        optimizer = FlashLion([p], lr=lr, **options)
        optimizer.step()
        errors = optimizer.state[p].get("error_bits")
        master = p.float() if errors is None else reconstruct_fp32_param(p, errors)
        assert (master > 3.0).all() == moves
        checked = FlashLion([p], lr=lr, check_numerics=True, **options)
        if moves:
            checked.step()
        else:
            with pytest.raises(NumericsError):
                checked.step()


def test_recomputed_statistics_are_what_the_next_check_sees():
    p = nn.Parameter(torch.full((1, 32), 1e-3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = FlashLion([p], lr=1e-5, check_numerics=True)
    optimizer.step()
    p.data.fill_(1e5)
    optimizer.step()
    optimizer.recompute_param_stats()
    with pytest.raises(NumericsError):
        optimizer.step()


SHAPES = st.lists(st.integers(0, 5), max_size=3).flatmap(
    lambda lead: st.integers(0, 70).map(lambda last: (*lead, last))
)


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    name=st.sampled_from(sorted(ALL)),
    lr=st.floats(0, 1),
    weight_decay=st.floats(0, 1),
    scale=st.sampled_from([0.0, 1e-30, 1e-7, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_finite_gradients_give_finite_weights_and_bounded_updates(shape, dtype, name, lr, weight_decay, scale, seed):
    cls, options = ALL[name]
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    optimizer = cls([p], lr=lr, **{**options, "weight_decay": weight_decay})
    for _ in range(3):
        before = p.detach().double()
        p.grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
        optimizer.step()
        assert p.isfinite().all()
        for value in optimizer.state[p].values():
            assert value.isfinite().all()
        if name == "adamw" and p.numel():
            # Within 3 steps Adam cannot move by more than 1.01 lr; then there are decay and the rounding of weights.
            limit = lr * (1.01 + weight_decay * before.abs()) + torch.finfo(dtype).eps * (before.abs() + lr)
            assert ((p.detach().double() - before).abs() <= limit + 1e-7).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bad=st.sampled_from([float("inf"), -float("inf"), float("nan")]),
    position=st.integers(0, 69),
)
def test_non_finite_gradients_never_reach_other_groups_or_parameters(name, dtype, bad, position):
    cls, options = ALL[name]

    def run(poison):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 70), (3, 70), (70,))]
        optimizer = cls(parameters, **options)
        for step in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape).to(dtype)
            if poison and step == 1:
                parameters[0].grad[1, position] = bad
            optimizer.step()
        return parameters

    poisoned, clean = run(True), run(False)
    group = slice(position // 32 * 32, position // 32 * 32 + 32)
    assert not poisoned[0][1, position].isfinite()
    with torch.no_grad():
        poisoned[0][1, group] = clean[0][1, group]
    for p, q in zip(poisoned, clean, strict=True):
        assert torch.equal(p, q)


@needs("torch", "2.8", "compiled code is thrown away with the gradients that it saw")
def test_compiling_the_step_follows_rate_and_step_without_recompiling():
    eager, compiled = small_model(), small_model()
    optimizers = [FlashAdamW(m.parameters(), lr=torch.tensor(1e-3)) for m in (eager, compiled)]
    train(eager, optimizers[0], range(1))
    train(compiled, optimizers[1], range(1))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = torch.compile(optimizers[1].step, backend="eager")
        for number, lr in ((1, 1e-3), (2, 5e-4), (3, 1e-4)):
            for optimizer, model in zip(optimizers, (eager, compiled), strict=True):
                optimizer.param_groups[0]["lr"].fill_(lr)
                set_gradients(model, number)
            optimizers[0].step()
            step()
    assert_bit_equal(tensors_of(eager, optimizers[0]), tensors_of(compiled, optimizers[1]))


def test_a_compiled_training_step_equals_the_ordinary_one_from_the_first_step_on():
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = small_model(torch.float32)
        optimizer = FlashAdamW(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(step, backend="aot_eager") if compiled else step
        for x in torch.randn(3, 4, 3, 6, 6, generator=torch.Generator().manual_seed(0)):
            step(x)
        results.append(tensors_of(model, optimizer))
    assert_bit_equal(*results)


def test_one_op_call_takes_many_parameters(monkeypatch):
    model = mixed_model()
    cast_model(model[3], torch.bfloat16)
    optimizer = FlashAdamW(model.parameters())
    calls = []
    original = FlashAdamW.step_batch
    monkeypatch.setattr(FlashAdamW, "step_batch", lambda *args: (calls.append(args[1]), original(*args)))
    train(model, optimizer, range(1))
    kinds = {(p.dtype, p.ndim >= 2) for p in model.parameters()}
    assert len(calls) == len(kinds) and sum(len(c.params) for c in calls) == len(list(model.parameters()))
