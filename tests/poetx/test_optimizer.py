"""Parameter groups of skew entries, and the reset of their optimizer state."""

import copy
import inspect
import math

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_poetx import PoetXConfig, add_skew_groups, create_poetx_optimizer, get_poetx_model, reset_optimizer_state
from hf_poetx.ops.skew import block_size, num_entries, unpack_skew
from hf_poetx.optimizer import check_resettable, skew_learning_rate, trainable_skew
from tests.poetx_training import tiny_poetx

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW-tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD-dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD-fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop-centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (getattr(torch.optim, "Muon", None), {}),
    "transformers-Adafactor": (
        transformers.Adafactor,
        {"scale_parameter": False, "relative_step": False, "beta1": 0.9, "warmup_init": False},
    ),
}
DISTRIBUTED_FORMAT = ["AdamW", "SGD-momentum", "Adagrad", "NAdam", "Adafactor"]


def third_party(package: str, name: str):
    """An optimizer of a package that the tests do not require."""
    module = pytest.importorskip(f"{package}.optim", reason=f"{package} is not installed")
    return getattr(module, name)


def two_parameters(size: int = 64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(2, size, generator=generator)) for _ in range(2)]


def step(optimizer, params: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def check_reset_equals_fresh(optimizer_cls, options: dict, size: int = 64) -> None:
    """After a reset of the first of two parameters: its next step is a fresh optimizer's first, the other's unchanged."""
    params, others = two_parameters(size), two_parameters(size)
    optimizer, undisturbed = (optimizer_cls(ps, **{"lr": 1e-2} | options) for ps in (params, others))
    for number in range(3):
        step(optimizer, params, number)
        step(undisturbed, others, number)
    fresh_params = copy.deepcopy(params)
    fresh = optimizer_cls(fresh_params, **{"lr": 1e-2} | options)
    before = dict(optimizer.state[params[0]])

    reset_optimizer_state(optimizer, params[:1])

    assert optimizer.state[params[0]].keys() == before.keys(), "state is never removed"
    for number in range(3, 5):
        for opt, ps in ((optimizer, params), (undisturbed, others), (fresh, fresh_params)):
            step(opt, ps, number)
        torch.testing.assert_close(params[0], fresh_params[0], rtol=0, atol=0)
        torch.testing.assert_close(params[1], others[1], rtol=0, atol=0)
    if before:
        assert not torch.equal(params[0], others[0]), "the reset must have mattered"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_after_reset_is_a_fresh_optimizers_first(name):
    optimizer_cls, options = OPTIMIZERS[name]
    if optimizer_cls is None:
        pytest.skip("this torch has no Muon")
    check_reset_equals_fresh(optimizer_cls, options)


@pytest.mark.parametrize("size", [64, 4096], ids=["fp32-state", "8bit-state"])
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_bitsandbytes_step_after_reset_is_a_fresh_optimizers_first(name, size):
    check_reset_equals_fresh(third_party("bitsandbytes", name), {}, size)


def test_bitsandbytes_keeps_its_code_tables():
    params = two_parameters(4096)
    optimizer = third_party("bitsandbytes", "AdamW8bit")(params, lr=1e-2)
    step(optimizer, params, 0)
    state = optimizer.state[params[0]]
    codes, table = state["state1"], state["qmap1"].clone()
    reset_optimizer_state(optimizer, params)
    assert optimizer.state[params[0]]["state1"] is codes, "the state is reset in place"
    assert torch.equal(optimizer.state[params[0]]["qmap1"], table)
    assert table.count_nonzero() > 200


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_torchao_step_after_reset_is_a_fresh_optimizers_first(name, monkeypatch):
    optimizer_cls = third_party("torchao", name)
    # It compiles its step, which takes a C++ compiler and half a minute; the formula is the same without.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    check_reset_equals_fresh(optimizer_cls, {}, size=4096)


@pytest.mark.parametrize("name", DISTRIBUTED_FORMAT)
def test_state_goes_through_the_distributed_format_after_a_reset(name):
    optimizer_cls, options = OPTIMIZERS[name]
    model = nn.Linear(6, 2, bias=False)
    optimizer = optimizer_cls(model.parameters(), **{"lr": 1e-2} | options)
    step(optimizer, [model.weight], 0)
    reset_optimizer_state(optimizer, [model.weight])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))

    other = copy.deepcopy(model)
    loaded = optimizer_cls(other.parameters(), **{"lr": 1e-2} | options)
    set_optimizer_state_dict(other, loaded, saved)

    step(optimizer, [model.weight], 1)
    step(loaded, [other.weight], 1)
    assert torch.equal(model.weight, other.weight)


def test_reset_before_the_first_step_does_nothing():
    params = two_parameters()
    optimizer = torch.optim.AdamW(params)
    reset_optimizer_state(optimizer, params)
    assert not optimizer.state


def test_optimizers_own_reset_state_is_used():
    class Resettable(torch.optim.AdamW):
        seen = None

        def reset_state(self, params):
            self.seen = params

    params = two_parameters()
    optimizer = Resettable(params)
    reset_optimizer_state(optimizer, params[:1])
    assert optimizer.seen == params[:1]


class KeepsACopy(torch.optim.AdamW):
    """An optimizer with state of its own, which zeros would destroy."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("average", parameter.clone())


@pytest.mark.parametrize("optimizer_cls", [KeepsACopy, torch.optim.LBFGS])
def test_unknown_optimizer_is_named(optimizer_cls):
    with pytest.raises(TypeError, match=rf"{optimizer_cls.__qualname__}.*reset_state.*merge_interval=0"):
        check_resettable(optimizer_cls(two_parameters()))


def test_subclass_with_the_known_step_is_known():
    class Renamed(torch.optim.AdamW):
        pass

    check_reset_equals_fresh(Renamed, {})


def test_every_torch_optimizer_is_known_or_refused():
    """A new optimizer in torch must be decided on, not missed."""
    names = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    refused = {"Optimizer", "LBFGS", "SparseAdam"}
    tested = {optimizer_cls.__name__ for optimizer_cls, _ in OPTIMIZERS.values() if optimizer_cls}
    assert names - refused == tested - {"Renamed"}


def test_rate_is_inverse_to_the_block():
    assert skew_learning_rate(1e-3, 256, 0.5) == 5e-4
    assert skew_learning_rate(1e-3, 64, 0.5) == 4 * skew_learning_rate(1e-3, 256, 0.5)
    assert skew_learning_rate(1e-3, 1024, 0.5) == 0.25 * skew_learning_rate(1e-3, 256, 0.5)


def test_steps_whose_signs_agree_turn_by_the_same_angle_at_every_block():
    sigmas = []
    for block in (16, 64, 256):
        step = torch.full((1, num_entries(block)), skew_learning_rate(1e-3, block, 1.0))
        sigmas.append(torch.linalg.matrix_norm(unpack_skew(step), 2).item())
    # The largest singular value is rate cot(pi / (2 block)): 2 rate block / pi but for a part (pi / block)^2 / 12.
    assert max(sigmas) / min(sigmas) < 1 + (math.pi / 16) ** 2 / 12 + 1e-5


def test_rates_set_before_the_schedule_are_what_it_starts_from():
    model = tiny_poetx(train_rest=True)
    optimizer = create_poetx_optimizer(model, torch.optim.AdamW, lr=1e-2)
    rates = [group["lr"] / 2 for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert schedule.base_lrs == rates


def test_groups_of_skew_entries_have_scaled_rate_and_no_decay():
    model = tiny_poetx(train_rest=True, poet_scale=0.25)
    optimizer = create_poetx_optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))
    skew = trainable_skew(model)
    rates = {group["lr"] for group in optimizer.param_groups if group["params"][0] in skew}
    assert rates == {skew_learning_rate(1e-2, block, 0.25) for block in (8, 4)}
    for group in optimizer.param_groups:
        is_skew = [parameter in skew for parameter in group["params"]]
        assert all(is_skew) or not any(is_skew)
        assert group["betas"] == (0.8, 0.9)
        if any(is_skew):
            assert group["weight_decay"] == 0
        else:
            assert group["lr"] == 1e-2
            assert group["weight_decay"] == (0.1 if group["params"][0].dim() >= 2 else 0)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}


def test_smaller_last_block_has_a_rate_of_its_own():
    model = get_poetx_model(nn.Sequential(nn.Linear(20, 16)), PoetXConfig(block=16))
    groups = add_skew_groups([{"params": list(model.parameters())}], model, lr=1.0)
    rates = {group["lr"] for group in groups if group["params"][0] in trainable_skew(model)}
    assert rates == {skew_learning_rate(1.0, 16, 0.5), skew_learning_rate(1.0, 4, 0.5)}


def test_options_of_a_group_stay_with_its_skew_entries():
    model = tiny_poetx()
    first, *rest = [parameter for parameter in trainable_skew(model) if block_size(parameter) == 8]
    groups = add_skew_groups(
        [{"params": [first], "betas": (0.5, 0.5)}, {"params": rest, "betas": (0.9, 0.9), "lr": 2e-2}], model, lr=1e-2
    )
    assert [(group["betas"], len(group["params"])) for group in groups] == [((0.5, 0.5), 1), ((0.9, 0.9), len(rest))]
    assert groups[1]["lr"] == 2 * groups[0]["lr"]


@pytest.mark.parametrize("kind", ["parameters", "named_parameters", "group of one tensor"])
def test_groups_are_taken_in_every_form_that_torch_takes(kind):
    model = tiny_poetx()
    if kind == "group of one tensor":
        given = [{"params": next(iter(trainable_skew(model)))}]
    else:
        given = [p for p in getattr(model, kind)() if (p[1] if isinstance(p, tuple) else p).requires_grad]
    optimizer = torch.optim.AdamW(add_skew_groups(given, model, lr=1e-2))
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates <= {skew_learning_rate(1e-2, block, 0.5) for block in (8, 4)} and rates


def test_missing_learning_rate_is_an_error():
    model = tiny_poetx()
    with pytest.raises(ValueError, match="None; state lr"):
        add_skew_groups([{"params": list(model.parameters())}], model)


def test_grouping_is_the_same_at_every_call():
    first, second = (
        [
            [tuple(p.shape) for p in group["params"]]
            for group in create_poetx_optimizer(tiny_poetx(train_rest=True), torch.optim.SGD, 1e-2).param_groups
        ]
        for _ in range(2)
    )
    assert first == second
