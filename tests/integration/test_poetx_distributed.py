"""Two processes over gloo: DDP and FSDP2 merge without communication, to the same weights as one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_poetx import attach_merging, create_poetx_optimizer, merge_step, merge_then_reinitialize
from hf_poetx.optimizer import trainable_skew
from tests.poetx_training import assert_same_state, batches, merge_counts, tiny_llama, tiny_poetx
from tests.versions import needs_fsdp2_on_gloo

ROOT = Path(__file__).parents[2]
WORLD = 2
STEPS, INTERVAL = 7, 2
SGD = {"optimizer_cls": torch.optim.SGD, "lr": 0.3, "momentum": 0.9}
ADAMW = {"optimizer_cls": torch.optim.AdamW, "lr": 1e-2}
# 32 = 2 x 12 + 8 and 44 = 3 x 12 + 8: three blocks and one tail do not divide evenly among two ranks.
UNEVEN = {"block": 12, "merge_interval": INTERVAL}


def half(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(WORLD)[rank] for key, value in batch.items()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / WORLD


def run_ddp(rank: int, optimizer: dict[str, Any], buffers: bool) -> dict[str, torch.Tensor]:
    # Ranks differ in their global random state, and nothing is broadcast after the start.
    torch.manual_seed(rank)
    model = tiny_poetx(**UNEVEN, train_rest=True)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False, broadcast_buffers=buffers)
    optimizer = create_poetx_optimizer(model, **optimizer)
    attach_merging(wrapped, optimizer)
    for batch in batches(STEPS):
        train_step(wrapped, optimizer, half(batch, rank))
    return model.state_dict()


def shard(model: nn.Module) -> nn.Module:
    base = model.get_base_model()
    for layer in base.model.layers:
        fully_shard(layer)
    return fully_shard(base) and model


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def run_fsdp2(rank: int, folder: Path) -> dict[str, Any]:
    model = shard(tiny_poetx(**UNEVEN))
    optimizer = create_poetx_optimizer(model, **SGD)
    losses, data = [], batches(STEPS)
    for number, batch in enumerate(data, start=1):
        losses.append(mean_over_ranks(train_step(model, optimizer, half(batch, rank))))
        with torch.no_grad():
            before = mean_over_ranks(model(**half(batch, rank)).loss)
        if merge_step(model, optimizer):
            with torch.no_grad():
                after = mean_over_ranks(model(**half(batch, rank)).loss)
            assert abs(after - before) < 1e-5, (before, after)
            momenta = [optimizer.state[p]["momentum_buffer"] for p in trainable_skew(model)]
            assert all(isinstance(m, DTensor) and not m.full_tensor().any() for m in momenta)
        if number == INTERVAL + 1:
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / "dcp")
    whole = whole_state(model)
    if rank == 0:
        model.save_pretrained(folder / "adapter", state_dict=whole)
    return {"losses": losses, "state": whole, "resumed": resume_fsdp2(rank, folder)}


def resume_fsdp2(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Load what was saved after one merge and one more step, and go on; the base model is another one at first."""
    model = shard(tiny_poetx(**UNEVEN, model_seed=5))
    optimizer = create_poetx_optimizer(model, **SGD)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for batch in batches(STEPS)[INTERVAL + 1 :]:
        train_step(model, optimizer, half(batch, rank))
        merge_step(model, optimizer)
    return whole_state(model)


def with_rotations(dtype: torch.dtype, **config: Any) -> nn.Module:
    model = tiny_poetx(dtype, **UNEVEN, **config)
    generator = torch.Generator().manual_seed(3)
    for parameter in trainable_skew(model):
        parameter.data.normal_(std=0.02, generator=generator)
    return model


MERGED = {"fp32": (torch.float32, {}), "bf16": (torch.bfloat16, {}), "bits": (torch.bfloat16, {"base_error_bits": 8})}


def run_rank(rank: str, folder: str) -> None:
    """What each of the processes does; its results are files for the tests below."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=WORLD)
    results = {
        "ddp": run_ddp(int(rank), SGD, buffers=False),
        "ddp-adamw": run_ddp(int(rank), ADAMW, buffers=True),
        "fsdp2": run_fsdp2(int(rank), Path(folder)),
    }
    for name, (dtype, config) in MERGED.items():
        model = shard(with_rotations(dtype, **config))
        merge_then_reinitialize(model)
        results[f"merged-{name}"] = whole_state(model)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results of both ranks, from one start of two processes, since importing takes longer than training."""
    folder = tmp_path_factory.mktemp("ranks")
    code = "import sys; from tests.integration.test_poetx_distributed import run_rank; run_rank(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(folder)], env=environment, cwd=ROOT)
        for rank in range(WORLD)
    ]
    try:
        assert [process.wait(timeout=180) for process in processes] == [0] * WORLD
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


def run_alone(optimizer: dict[str, Any], **config: Any) -> tuple[nn.Module, list[float]]:
    model = tiny_poetx(**UNEVEN, **config)
    optimizer = create_poetx_optimizer(model, **optimizer)
    losses = []
    for batch in batches(STEPS):
        losses.append(train_step(model, optimizer, batch).item())
        merge_step(model, optimizer)
    assert merge_counts(model) == {3}
    return model, losses


def assert_states_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def assert_states_close(state: dict[str, torch.Tensor], alone: nn.Module, start: nn.Module) -> None:
    """Integers are equal; a weight differs by rounding of its gradients, summed in another order: a small part of its path.

    A sum of n terms is off by about sqrt(n) 2^-24 of their size; here a few hundred, and cancellation within them costs
    another factor of ten. Writing a merged weight rounds it, by 2^-24 of itself.
    """
    origin = start.state_dict()
    for name, expected in alone.state_dict().items():
        if not expected.is_floating_point():
            assert torch.equal(state[name], expected), name
            continue
        path = (expected - origin[name]).norm() + 2**-20 * expected.norm()
        assert (state[name] - expected).norm() <= 2e-5 * path + 2**-24 * expected.norm(), name


@pytest.mark.parametrize("run", ["ddp", "ddp-adamw"])
def test_ddp_ranks_are_bitwise_equal_after_merges(ranks, run):
    first, second = (rank[run] for rank in ranks)
    assert_states_equal(first, second)
    assert {int(v) for name, v in first.items() if "merge_count" in name} == {3}


def test_ddp_equals_one_process_with_the_same_batch(ranks):
    alone, _ = run_alone(SGD, train_rest=True)
    assert_states_close(ranks[0]["ddp"], alone, tiny_poetx(**UNEVEN, train_rest=True))


@needs_fsdp2_on_gloo
def test_fsdp2_equals_one_process_with_the_same_batch(ranks):
    alone, losses = run_alone(SGD)
    for rank in ranks:
        assert rank["fsdp2"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert_states_close(ranks[0]["fsdp2"]["state"], alone, tiny_poetx(**UNEVEN))


@pytest.mark.parametrize("name", MERGED)
def test_fsdp2_merge_is_bitwise_that_of_one_process(ranks, name):
    dtype, config = MERGED[name]
    model = with_rotations(dtype, **config)
    merge_then_reinitialize(model)
    assert_states_equal(ranks[0][f"merged-{name}"], model.state_dict())


def test_fsdp2_resumes_from_a_distributed_checkpoint_bitwise(ranks):
    assert_states_equal(ranks[0]["fsdp2"]["resumed"], ranks[0]["fsdp2"]["state"])


@needs_fsdp2_on_gloo
def test_distributed_checkpoint_of_two_ranks_goes_on_in_one_process(folder):
    model = tiny_poetx(**UNEVEN, model_seed=5)
    optimizer = create_poetx_optimizer(model, **SGD)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert merge_counts(model) == {1}
    for batch in batches(STEPS)[INTERVAL + 1 :]:
        train_step(model, optimizer, batch)
        merge_step(model, optimizer)
    alone, _ = run_alone(SGD)
    assert_states_close(model.state_dict(), alone, tiny_poetx(**UNEVEN))


def test_adapter_of_a_sharded_model_loads_in_one_process(folder, ranks):
    model = PeftModel.from_pretrained(tiny_llama(), folder / "adapter")
    assert_states_equal(ranks[0]["fsdp2"]["state"], model.state_dict())
    assert_same_state(model, PeftModel.from_pretrained(tiny_llama(seed=9), folder / "adapter"))
