"""FlashOptim on 2 and 4 processes over gloo: DDP, unevenly sharded FSDP2, and checkpoints between numbers of ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hf_flashoptim import FlashAdamW
from tests.flashoptim.llama import make_trainer, single_thread  # noqa: F401
from tests.flashoptim.models import assert_bit_equal
from tests.integration.flash_ranks import (
    BATCH,
    CASES,
    RANKS,
    WHOLE,
    Model,
    backward,
    before_and_after_a_step,
    data,
    everything,
    load_all,
    save_all,
    trained,
)
from tests.versions import needs_fsdp2_on_gloo

# All of it, as one start of the processes does everything.
pytestmark = needs_fsdp2_on_gloo
ROOT = Path(__file__).parents[2]
WORLDS = ("2", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results of four processes, started once, since importing takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    models = {name: Model() for name in CASES}
    save_all({name: (model, trained(CASES[name], model)) for name, model in models.items()}, folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.flash_ranks", str(folder)]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        assert process.wait(timeout=300) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    """Every case trained by one process."""
    models = {name: Model() for name in CASES}
    return {name: everything(model, trained(CASES[name], model)) for name, model in models.items()}


@pytest.fixture(scope="module")
def resumed() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Every case through its plain state dict in one process, before and after another step."""
    results = {}
    for name, case in CASES.items():
        model, fresh = Model(), Model(seed=1)
        optimizer, other = trained(case, model), case.optimizer(fresh)
        fresh.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        results[name] = before_and_after_a_step(fresh, other)
    return results


def of_world(ranks: list[dict[str, Any]], world: str) -> list[dict[str, Any]]:
    return [rank[world] for rank in ranks[: int(world)]]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_weights_and_state_of_every_rank_equal_those_of_one_process_bit_for_bit(ranks, alone, wrapper, name, world):
    for rank in of_world(ranks, world):
        assert_bit_equal(rank[wrapper][name], alone[name])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_with_a_part_of_the_batch_each_ranks_agree_and_step_the_mean_gradient(ranks, wrapper, world):
    first, *others = (rank["own data"][wrapper] for rank in of_world(ranks, world))
    for other in others:
        assert_bit_equal(other["state"], first["state"])
    model = Model()
    optimizer = CASES["adamw"].optimizer(model)
    for gradients in first["gradients"]:
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    assert_bit_equal(first["state"], everything(model, optimizer))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_mean_gradient_is_that_of_the_whole_batch(ranks, wrapper, world):
    """Up to rounding. Each of the ranks and the whole round a gradient, its terms and the activations within them.

    A gradient of this model is a sum over the batch behind four layers; each of those rounds its output and what it
    hands back, once in the parameter's dtype or its neighbor's, so at most about 8 roundings of 2^-8 (bf16) of the
    sizes that enter: of single examples' gradients, which partly cancel in the sum.
    """
    gradients = ranks[0][world]["own data"][wrapper]["gradients"][0]
    single = []
    for example in data(0):
        model = Model()
        backward(model, example[None])
        single.append({name: p.grad.double() / BATCH for name, p in model.named_parameters()})
    model = Model()
    backward(model, data(0))
    for name, p in model.named_parameters():
        size = sum(gradient[name].norm() for gradient in single)
        assert (gradients[name].double() - p.grad.double()).norm() <= 8 * 2**-8 * size, name
        assert p.grad.any(), name


def test_hybrid_shards_are_rows_of_one_process(ranks, alone):
    """Ranks 0 and 1 have the two parts, ranks 2 and 3 copies of them."""
    parts = [rank["hybrid"] for rank in ranks]
    assert_bit_equal(parts[0], parts[2])
    assert_bit_equal(parts[1], parts[3])
    joined = {
        name: first if name.endswith("step") else torch.cat([first, parts[1][name]])
        for name, first in parts[0].items()
    }
    assert_bit_equal(joined, alone["adamw"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", ["1->2", "2->4", "4->2"])
def test_checkpoints_load_on_another_number_of_ranks_and_go_on_bit_for_bit(ranks, resumed, change, name):
    """Error bits of 16 and 8 bits too, and after resets. Uncompressed: as in one process, which quantizes on loading."""
    for rank in ranks[: int(change[-1])]:
        for found, expected in zip(rank[change][name], resumed[name], strict=True):
            assert_bit_equal(found, expected)


@pytest.mark.parametrize("source", [2, 4])
def test_checkpoints_of_several_ranks_load_in_one_process(folder, resumed, source):
    for name, results in load_all(folder, source).items():
        for found, expected in zip(results, resumed[name], strict=True):
            assert_bit_equal(found, expected)


def test_compressed_checkpoints_lose_nothing(alone, resumed):
    for name, case in CASES.items():
        if case.options.get("compress_state_dict", True):
            assert_bit_equal(resumed[name][0], alone[name])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["full", "broadcast"])
def test_whole_state_dicts_load_into_sharded_models_bit_for_bit(ranks, resumed, kind, name, world):
    for rank in of_world(ranks, world):
        for found, expected in zip(rank[kind][name]["loaded"], resumed[name], strict=True):
            assert_bit_equal(found, expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["full", "broadcast"])
def test_whole_state_dicts_of_sharded_models_are_plain_and_load_in_one_process(ranks, resumed, kind, name, world):
    state = ranks[0][world][kind][name]["full"]
    model = Model(seed=1)
    optimizer = CASES[name].optimizer(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    for found, expected in zip(before_and_after_a_step(model, optimizer), resumed[name], strict=True):
        assert_bit_equal(found, expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "layout, fix",
    [
        ("Shard(1)", "Shard dimension 0"),
        ("FSDP1", "fully_shard"),
        ("FSDP1-originals", "fully_shard"),
        ("FSDP1-later", "fully_shard"),
    ],
)
def test_layouts_that_cannot_be_stepped_are_refused_with_the_fix(ranks, layout, fix, world):
    for rank in of_world(ranks, world):
        assert fix in rank["refusals"][layout]


def test_flat_parameters_in_place_of_the_given_ones_are_refused():
    """What DeepSpeed's ZeRO does to the optimizer that it is given."""
    model = Model()
    optimizer = FlashAdamW(model.parameters())
    flat = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).requires_grad_()
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(ValueError, match="DeepSpeed"):
        optimizer.step()
    assert not optimizer.state


def test_an_optimizer_of_vectors_alone_is_not_mistaken_for_a_flattened_one():
    p = torch.ones(40, requires_grad=True)
    p.grad = torch.ones(40)
    FlashAdamW([p]).step()
    assert (p < 1).all()


def test_trainer_refuses_deepspeed_when_it_is_made(tmp_path, monkeypatch):
    """The launcher of accelerate leaves its configuration in the arguments."""
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "hf_deepspeed_config", object(), raising=False)
    with pytest.raises(ValueError, match="DeepSpeed"):
        make_trainer(tmp_path)
    make_trainer(tmp_path, optim="adamw_torch")
