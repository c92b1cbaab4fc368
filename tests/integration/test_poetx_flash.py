"""POET-X and FlashOptim together: two packages that know of each other only by `reset_state` and parameter groups."""

import copy

import pytest
import torch
from torch import nn

import hf_flashoptim
from hf_poetx import reset_optimizer_state
from hf_poetx.optimizer import skew_learning_rate, trainable_skew
from tests.poetx_training import assert_same_state, losses, make_trainer, merge_counts, tiny_poetx

CLASSES = {
    "flash_adamw": hf_flashoptim.FlashAdamW,
    "flash_adam": hf_flashoptim.FlashAdam,
    "flash_sgd": hf_flashoptim.FlashSGD,
    "flash_sgdw": hf_flashoptim.FlashSGDW,
    "flash_lion": hf_flashoptim.FlashLion,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CLASSES)
def test_step_after_reset_is_a_fresh_optimizers_first(name, dtype):
    options = {"lr": 1e-2} | ({"momentum": 0.9} if "sgd" in name else {})
    params = [nn.Parameter(torch.randn(4, 64).to(dtype)) for _ in range(2)]
    others = copy.deepcopy(params)
    optimizer, undisturbed = (CLASSES[name](ps, **options) for ps in (params, others))
    gradients = [[torch.randn(4, 64).to(dtype) for _ in range(2)] for _ in range(5)]

    def step(opt, ps, number):
        for parameter, gradient in zip(ps, gradients[number], strict=True):
            parameter.grad = gradient.clone()
        opt.step()

    for number in range(3):
        step(optimizer, params, number)
        step(undisturbed, others, number)
    fresh_params = copy.deepcopy(params)
    fresh = CLASSES[name](fresh_params, **options)
    keys = optimizer.state[params[0]].keys()

    reset_optimizer_state(optimizer, params[:1])

    assert optimizer.state[params[0]].keys() == keys
    for number in range(3, 5):
        for opt, ps in ((optimizer, params), (undisturbed, others), (fresh, fresh_params)):
            step(opt, ps, number)
        assert torch.equal(params[0], fresh_params[0])
        assert torch.equal(params[1], others[1])
    assert not torch.equal(params[0], others[0]), "the reset must have mattered"


@pytest.mark.parametrize("optim", CLASSES)
def test_trainer_gives_skew_entries_their_group_and_resets_them(tmp_path, optim):
    model = tiny_poetx(torch.bfloat16, train_rest=True)
    arguments = {"optim": optim, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1, "max_steps": 4}
    trainer = make_trainer(model, tmp_path, **arguments)
    trainer.train()
    skew = trainable_skew(model)
    groups = [group for group in trainer.optimizer.param_groups if group["params"][0] in skew]
    assert {group["initial_lr"] for group in groups} == {skew_learning_rate(1e-2, block, 0.5) for block in (8, 4)}
    assert all(group["weight_decay"] == 0 for group in groups)
    moved = {
        parameter
        for parameter, state in trainer.optimizer.optimizer.state.items()
        if any(torch.as_tensor(value).any() for value in state.values())
    }
    assert moved and moved.isdisjoint(skew)
    assert merge_counts(model) == {2}


def test_layers_kept_out_of_compression_keep_their_groups(tmp_path):
    model = tiny_poetx(train_rest=True)
    arguments = {"optim": "flash_adamw", "optim_args": "exempt=*.embed_tokens", "max_steps": 2}
    trainer = make_trainer(model, tmp_path, **arguments)
    trainer.train()
    assert merge_counts(model) == {1}
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }


def test_gradient_release_with_merges_is_bitwise_the_same_training(tmp_path):
    """Without clipping, which it cannot do; so clip warm-up is off too."""
    models = [tiny_poetx(torch.bfloat16, train_rest=True, merge_interval=3) for _ in range(2)]
    logged = []
    for model, release in zip(models, ("false", "true"), strict=True):
        arguments = {"optim": "flash_adamw", "optim_args": f"gradient_release={release}", "max_grad_norm": 0.0}
        trainer = make_trainer(model, tmp_path, **arguments)
        trainer.train()
        logged.append(losses(trainer))
    assert logged[0] == logged[1] and merge_counts(models[1]) == {2}
    assert_same_state(*models)


def test_bf16_skew_entries_train_with_error_bits(tmp_path):
    """Their updates are far below a bf16 rounding step of entries that have grown."""
    model = tiny_poetx(torch.bfloat16, skew_dtype="bfloat16", merge_interval=0)
    trainer = make_trainer(model, tmp_path, optim="flash_adamw", max_steps=6)
    trainer.train()
    for parameter in trainable_skew(model):
        assert parameter.dtype == torch.bfloat16 and parameter.any()
        assert trainer.optimizer.optimizer.state[parameter]["error_bits"].any()
