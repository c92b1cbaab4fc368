"""Blocks are kept between forward passes of evaluation, and never longer than the entries that they were made of."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_poetx import PoetXConfig, block_cache, merge_then_reinitialize
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.ops.rotation import Rotation
from tests.poetx.helpers import logits, randomize_skew, tokens, trained_poetx


@pytest.fixture
def built(monkeypatch) -> list[Rotation]:
    """The rotations whose blocks were built."""
    seen: list[Rotation] = []
    original = Rotation.blocks

    def blocks(self: Rotation, dtype: torch.dtype):
        seen.append(self)
        return original(self, dtype)

    monkeypatch.setattr(Rotation, "blocks", blocks)
    return seen


def rotations_of(model: nn.Module) -> int:
    return 2 * sum(1 for _ in poetx_layers(model))


def with_hooks(model: nn.Module) -> nn.Module:
    """Base layers that have to be run themselves, as quantized ones are."""
    for _, layer in poetx_layers(model):
        layer.base_layer.register_forward_hook(lambda *_: None)
    return model


KINDS = {"plain": lambda: trained_poetx(), "hooked": lambda: with_hooks(trained_poetx())}


@pytest.mark.parametrize("kind", KINDS)
def test_generation_builds_every_block_once(built, kind):
    model = KINDS[kind]().eval()
    model.generate(input_ids=tokens(), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert len(built) == rotations_of(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outputs_with_kept_blocks_are_the_same_bit_for_bit(context):
    model = trained_poetx().eval()
    # Its forward pass keeps nothing, since gradients could be asked for.
    expected = model(input_ids=tokens()).logits
    with context():
        for _ in range(2):
            assert torch.equal(model(input_ids=tokens()).logits, expected)


def in_place(model: nn.Module) -> None:
    randomize_skew(model, seed=9)


def by_data(model: nn.Module) -> None:
    for _, layer in poetx_layers(model):
        for parameter in layer.skew_parameters("default"):
            parameter.data.neg_()


def new_data(model: nn.Module) -> None:
    for _, layer in poetx_layers(model):
        for parameter in layer.skew_parameters("default"):
            parameter.data = -parameter.data


@torch.inference_mode()
def in_inference_mode(model: nn.Module) -> None:
    by_data(model)


def new_state(model: nn.Module, assign: bool = False) -> None:
    other = randomize_skew(trained_poetx(), seed=9)
    model.load_state_dict(other.state_dict(), assign=assign)


def optimizer_step(model: nn.Module) -> None:
    """In evaluation mode, so that no change of mode tells of it."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()


def another_adapter(model: nn.Module) -> None:
    model.add_adapter("other", PoetXConfig(block=7, merge_interval=0))
    randomize_skew(model, seed=9, adapter_name="other")
    model.set_adapter("other")


CHANGES = {
    "in place": in_place,
    "data in place": by_data,
    "data": new_data,
    "inference mode": in_inference_mode,
    "load_state_dict": new_state,
    "load_state_dict, assigned": lambda model: new_state(model, assign=True),
    "optimizer step": optimizer_step,
    "set_adapter": another_adapter,
    "merge": merge_then_reinitialize,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_built_anew_after_any_change_of_the_entries(kind, change):
    model = KINDS[kind]()
    before = logits(model)
    CHANGES[change](model)
    # Kept blocks are no part of a copy.
    expected = logits(copy.deepcopy(model))
    assert not torch.equal(expected, before)
    assert torch.equal(logits(model), expected)


def test_an_adapter_that_is_loaded_over_another_is_the_one_that_runs(tmp_path):
    model, other = trained_poetx(), randomize_skew(trained_poetx(), seed=9)
    other.save_pretrained(tmp_path)
    logits(model)
    model.load_adapter(tmp_path, "default")
    assert torch.equal(logits(model), logits(other))


def kept(model: nn.Module) -> int:
    return sum(len(layer._block_cache._kept) for _, layer in poetx_layers(model))


def test_nothing_is_kept_for_training():
    model = trained_poetx()
    logits(model)
    assert kept(model) == rotations_of(model)
    model.train()
    assert kept(model) == 0
    with torch.no_grad():
        # The first pass of activation checkpointing.
        model(input_ids=tokens())
    assert kept(model) == 0
    logits(model)
    model(input_ids=tokens())
    assert kept(model) == 0, "a forward pass with gradients frees them"


def test_copies_and_pickles_hold_no_blocks():
    model = trained_poetx()
    logits(model)
    assert kept(copy.deepcopy(model)) == 0
    layer = next(layer for _, layer in poetx_layers(model))
    assert not pickle.loads(pickle.dumps(layer._block_cache))._kept


def test_mixed_precision_keeps_blocks_of_both_dtypes(built):
    model = trained_poetx()
    full = logits(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            logits(model)
        assert torch.equal(logits(model), full)
    assert len(built) == 2 * rotations_of(model)


def test_a_step_of_any_optimizer_ends_what_is_kept_where_values_are_not_compared():
    """Fused optimizers of torch change parameters on a GPU without a new version."""
    entries = [torch.zeros(1, 3, device="meta")]
    kept = block_cache._Kept(entries, [entries[0]._version], block_cache._OptimizerSteps.count, (entries[0], None))
    assert block_cache._unchanged(kept, entries)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    assert not block_cache._unchanged(kept, entries)
