"""State of sharded parameters, in a mesh of one process (several processes: tests of distributed training)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_flashoptim import FlashAdamW, enable_gradient_release, gradient_release
from tests.flashoptim.models import small_model


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh, dim=0):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(p.data, mesh, [Shard(min(dim, p.ndim - 1))])
            setattr(module, name, nn.Parameter(placed))
    return model


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


@pytest.mark.parametrize("bits", [24, 32])
def test_sharded_steps_state_and_state_dicts_equal_plain_ones(mesh, bits):
    plain, model = small_model(), sharded(small_model(), mesh)
    optimizers = [FlashAdamW(m.parameters(), master_weight_bits=bits) for m in (plain, model)]
    for step in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            set_gradients(m, step)
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.full_tensor())
        for key, value in optimizers[1].state[q].items():
            if key != "step":
                assert isinstance(value, DTensor) and value.placements == q.placements
                assert value.to_local().equal(optimizers[0].state[p][key])
    saved = optimizers[1].state_dict()
    for state in saved["state"].values():
        assert all(value.dtype != torch.int16 for value in state.values()), "collectives have no int16"
    # What is saved in one layout loads in the other.
    for source, target, m in ((1, 0, plain), (0, 1, model)):
        fresh = FlashAdamW(m.parameters(), master_weight_bits=bits)
        fresh.load_state_dict(optimizers[source].state_dict())
        for p in m.parameters():
            for key, value in fresh.state[p].items():
                expected = optimizers[target].state[p][key]
                local = value.to_local() if isinstance(value, DTensor) else value
                assert local.equal(expected.to_local() if isinstance(expected, DTensor) else expected)


def test_sharding_along_groups_is_refused_and_says_what_to_do(mesh):
    p = nn.Parameter(distribute_tensor(torch.zeros(4, 64), mesh, [Shard(1)]))
    p.grad = distribute_tensor(torch.ones(4, 64), mesh, [Shard(1)])
    optimizer = FlashAdamW([p])
    with pytest.raises(ValueError, match="quantize=False"):
        optimizer.step()
    FlashAdamW([p], quantize=False).step()


def test_fp32_weights_of_sharded_models(mesh):
    model = sharded(small_model(), mesh)
    optimizer = FlashAdamW(model.parameters())
    set_gradients(model, 0)
    optimizer.step()
    weights = optimizer.get_fp32_model_state_dict(model)
    assert all(isinstance(w, DTensor) and w.dtype == torch.float32 for w in weights.values())
    fresh = sharded(small_model(seed=1), mesh)
    other = FlashAdamW(fresh.parameters())
    other.set_fp32_model_state_dict(fresh, {name: w.full_tensor() for name, w in weights.items()})
    for name, w in other.get_fp32_model_state_dict(fresh).items():
        assert torch.equal(w.full_tensor(), weights[name].full_tensor())


@pytest.mark.parametrize("held", [0, 20_000, 1 << 30], ids=["nothing_waits", "some_wait", "all_wait"])
def test_gradient_release_with_fully_shard(mesh, held, monkeypatch):
    monkeypatch.setattr(gradient_release, "gradient_bytes_to_hold", lambda params: held)
    results = []
    for release in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        nn.init.constant_(model[0].weight, 0.01), nn.init.constant_(model[2].weight, -0.01)
        for m in model:
            m.float()
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = FlashAdamW(model.parameters())
        if release:
            enable_gradient_release(model, optimizer, max_grad_norm=1e6)
        for step in range(3):
            model(torch.full((2, 64), 0.1 * step)).square().sum().backward()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.full_tensor() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_reset_works_on_sharded_state(mesh):
    model = sharded(small_model(), mesh)
    optimizer = FlashAdamW(model.parameters())
    set_gradients(model, 0)
    optimizer.step()
    optimizer.reset_state([model[2].weight])
    for value in optimizer.state[model[2].weight].values():
        assert not (value.to_local() if isinstance(value, DTensor) else value).any()
