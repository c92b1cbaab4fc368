"""What each process of ``test_flash_distributed.py`` does: gloo worlds of 2 and 4 ranks, one after the other."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from hf_flashoptim import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

RANKS = 4
STEPS = 3
BATCH = 8


@dataclass(frozen=True)
class Case:
    """An optimizer, the steps before its checkpoint, and the format of that."""

    cls: type[FlashOptimizer] = FlashAdamW
    options: dict[str, Any] = field(default_factory=dict)
    # "some": one matrix and its bias, after all steps; "all": every parameter, before the last step.
    reset: str = ""

    def optimizer(self, model: nn.Module) -> FlashOptimizer:
        return self.cls(model.parameters(), lr=1e-2, weight_decay=0.1, **self.options)


CASES = {
    "adamw": Case(),
    "adamw-32": Case(options={"master_weight_bits": 32}),
    "adamw-uncompressed": Case(options={"master_weight_bits": 32, "compress_state_dict": False}),
    "adamw-reset": Case(reset="some"),
    "adamw-reset-all": Case(options={"master_weight_bits": 32}, reset="all"),
    "lion": Case(FlashLion),
    "sgd": Case(FlashSGD, {"momentum": 0.9, "master_weight_bits": 32}),
}
# Those that also go through whole state dicts.
WHOLE = ("adamw", "adamw-32", "adamw-uncompressed")


class Model(nn.Module):
    """Rows that divide among neither 2 nor 4 ranks, 5 and 1 leaving some of them empty; in bf16, fp16 and fp32."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            [
                nn.Linear(40, 7, dtype=torch.bfloat16),
                nn.Linear(7, 5, dtype=torch.float32),
                nn.Linear(5, 66, bias=False, dtype=torch.float16),
                nn.Linear(66, 1, dtype=torch.bfloat16),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def data(step: int) -> Tensor:
    return torch.randn(BATCH, 40, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, x: Tensor) -> None:
    # Scaled, so that gradients in fp16 do not underflow when they are averaged.
    ((model(x) - 1).square().mean() * 4096).backward()


def train(model: nn.Module, optimizer: FlashOptimizer, steps: range) -> None:
    """On every rank the same data: the mean of 2 or 4 equal gradients is exact."""
    for step in steps:
        backward(model, data(step))
        optimizer.step()
        optimizer.zero_grad()


def trained(case: Case, model: nn.Module) -> FlashOptimizer:
    """The optimizer as it is when its checkpoint is written."""
    optimizer = case.optimizer(model)
    layers = (model.module if isinstance(model, DistributedDataParallel) else model).layers
    train(model, optimizer, range(STEPS - 1))
    if case.reset == "all":
        optimizer.reset_state(list(model.parameters()))
    train(model, optimizer, range(STEPS - 1, STEPS))
    if case.reset == "some":
        optimizer.reset_state(list(layers[0].parameters()))
    return optimizer


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of all ranks put together, by a way of our own: neither torch's gathering nor its checkpoints."""
    local = {name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}
    if not any(isinstance(t, DTensor) for t in tensors.values()):
        return local
    ranks: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, local)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local[name] = torch.cat([parts[name] for parts in ranks])
            assert local[name].shape == tensor.shape, (name, local[name].shape, tensor.shape)
    return local


def state_of(model: nn.Module, optimizer: FlashOptimizer) -> dict[str, Tensor]:
    """Every weight and every state tensor by name, as this rank has it."""
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        tensors[name] = p
        for key, value in optimizer.state[p].items():
            assert key == "step" or isinstance(value, DTensor) == isinstance(p, DTensor), key
            tensors[f"{name}.{key}"] = value
    return tensors


def everything(model: nn.Module, optimizer: FlashOptimizer) -> dict[str, Tensor]:
    return whole(state_of(model, optimizer))


def sharded(seed: int = 0, mesh: DeviceMesh | None = None) -> Model:
    model = Model(seed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpoint(model: nn.Module, optimizer: FlashOptimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save_all(trainings: dict[str, tuple[nn.Module, FlashOptimizer]], folder: Path) -> None:
    """One distributed checkpoint, of all cases."""
    state = {name: checkpoint(*training) for name, training in trainings.items()}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    dcp.save(state, checkpoint_id=folder / f"from-{ranks}", no_dist=not dist.is_initialized())


def load_all(folder: Path, ranks: int) -> dict[str, Any]:
    """What the checkpoint written by so many ranks gives in new models here, before and after another step."""
    models = {name: sharded(seed=1) if dist.is_initialized() else Model(seed=1) for name in CASES}
    trainings = {name: (model, CASES[name].optimizer(model)) for name, model in models.items()}
    state = {name: checkpoint(*training) for name, training in trainings.items()}
    dcp.load(state, checkpoint_id=folder / f"from-{ranks}", no_dist=not dist.is_initialized())
    for name, (model, optimizer) in trainings.items():
        set_model_state_dict(model, state[name]["model"])
        set_optimizer_state_dict(model, optimizer, state[name]["optimizer"])
    return {name: before_and_after_a_step(*training) for name, training in trainings.items()}


def before_and_after_a_step(
    model: nn.Module, optimizer: FlashOptimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    before = everything(model, optimizer)
    train(model, optimizer, range(STEPS, STEPS + 1))
    return before, everything(model, optimizer)


def through_full_state(case: Case, model: nn.Module, optimizer: FlashOptimizer, broadcast: bool) -> dict[str, Any]:
    """Out as one whole state dict, and into another sharded model: from every rank's copy, or from that of rank 0."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, cpu_offload=broadcast)
    full = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    other = sharded(seed=1)
    fresh = case.optimizer(other)
    if broadcast and dist.get_rank():
        assert not full["optimizer"], "with cpu_offload only rank 0 has it"
    # Setting consumes parts of what it is given.
    kept = {part: dict(content) for part, content in full.items()}
    set_model_state_dict(other, full["model"], options=options)
    set_optimizer_state_dict(other, fresh, full["optimizer"], options=options)
    return {"full": kept, "loaded": before_and_after_a_step(other, fresh)}


def parts_of(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def with_own_data(model: nn.Module) -> dict[str, Any]:
    """Each rank has its part of the batch; the averaged gradients are kept, to be stepped by one process."""
    optimizer = CASES["adamw"].optimizer(model)
    gradients = []
    for step in range(STEPS):
        backward(model, parts_of(data(step)))
        gradients.append(whole({name.removeprefix("module."): p.grad for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "state": everything(model, optimizer)}


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "not refused"


def refusals() -> dict[str, str]:
    """What compressed optimizers say of layouts that they cannot step."""

    def along_groups() -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        p = nn.Parameter(distribute_tensor(torch.zeros(4, 64), mesh, [Shard(1)]))
        p.grad = torch.ones_like(p)
        FlashAdamW([p]).step()

    def fsdp1(use_orig_params: bool, wrap_first: bool) -> None:
        model = nn.Linear(40, 7)
        optimizer = None if wrap_first else FlashAdamW(model.parameters())
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        optimizer = optimizer or FlashAdamW(model.parameters())
        assert not wrap_first, "construction should have failed"
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()

    return {
        "Shard(1)": refusal(along_groups),
        "FSDP1": refusal(lambda: fsdp1(use_orig_params=False, wrap_first=True)),
        "FSDP1-originals": refusal(lambda: fsdp1(use_orig_params=True, wrap_first=True)),
        "FSDP1-later": refusal(lambda: fsdp1(use_orig_params=True, wrap_first=False)),
    }


@contextmanager
def world(rank: int, size: int, store: Path) -> Iterator[bool]:
    """A process group of the first ``size`` ranks; says whether this process is in it."""
    if rank < size:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield rank < size
        if rank < size:
            dist.barrier()
    finally:
        if rank < size:
            dist.destroy_process_group()


def train_and_save_all(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"ddp": {}, "full": {}, "broadcast": {}}
    trainings = {}
    for name, case in CASES.items():
        model = DistributedDataParallel(Model())
        results["ddp"][name] = everything(model, trained(case, model))
        model = sharded()
        trainings[name] = (model, trained(case, model))
    results["fsdp2"] = {name: everything(*training) for name, training in trainings.items()}
    save_all(trainings, folder)
    for name in WHOLE:
        results["full"][name] = through_full_state(CASES[name], *trainings[name], broadcast=False)
        results["broadcast"][name] = through_full_state(CASES[name], *trainings[name], broadcast=True)
    results["own data"] = {
        "ddp": with_own_data(DistributedDataParallel(Model())),
        "fsdp2": with_own_data(sharded()),
    }
    results["refusals"] = refusals()
    return results


def hybrid() -> dict[str, Tensor]:
    """Sharded over 2 ranks, replicated over 2 such pairs; the parts of one pair."""
    model = sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    optimizer = trained(CASES["adamw"], model)
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state_of(model, optimizer).items()
    }


def run_rank(rank: int, folder: Path) -> None:
    """Results of all worlds in a file of this rank; checkpoints of one process are there already."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with world(rank, 2, folder / "store-2") as member:
        if member:
            results["2"] = train_and_save_all(folder)
            results["1->2"] = load_all(folder, 1)
    with world(rank, 4, folder / "store-4"):
        results["4"] = train_and_save_all(folder)
        results["2->4"] = load_all(folder, 2)
        results["hybrid"] = hybrid()
    with world(rank, 2, folder / "store-2-again") as member:
        if member:
            results["4->2"] = load_all(folder, 4)
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    # Forked, so that they share one import, which takes longer than all they do.
    start_processes(run_rank, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
