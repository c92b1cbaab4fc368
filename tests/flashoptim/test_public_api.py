"""The API of flashoptim 0.1.4: its names, its signatures, and its documented usage with the import changed."""

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_flashoptim
from hf_flashoptim import FlashAdamW, FlashSGD, cast_model, enable_gradient_release


def test_names_and_keyword_arguments_are_flashoptims_with_its_defaults():
    flashoptim = pytest.importorskip("flashoptim", reason="the reference is not installed")
    assert set(flashoptim.__all__) <= set(hf_flashoptim.__all__)
    for name in flashoptim.__all__:
        theirs, ours = getattr(flashoptim, name), getattr(hf_flashoptim, name)
        if name in ("NumericsError", "GradientReleaseHandle"):
            continue
        parameters = inspect.signature(ours).parameters
        for key, parameter in inspect.signature(theirs).parameters.items():
            assert parameters[key].default == parameter.default, (name, key)
            assert parameters[key].kind == parameter.kind, (name, key)
    methods = ("step", "step_param", "zero_grad", "state_dict", "load_state_dict", "recompute_param_stats")
    methods += ("get_fp32_model_state_dict", "set_fp32_model_state_dict", "add_param_group")
    for method in methods:
        ours = inspect.signature(getattr(hf_flashoptim.FlashOptimizer, method)).parameters
        assert list(inspect.signature(getattr(flashoptim.FlashOptimizer, method)).parameters)[1:] == list(ours)[1:]


def make(**cast):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    cast_model(model, dtype=torch.bfloat16, **cast)
    return model


def test_quickstart():
    model = make()
    optimizer = FlashAdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model(x).sum() < loss


def test_saving_and_loading_fp32_weights(tmp_path):
    model = make(full_precision_layers=["2"])
    optimizer = FlashAdamW(model.parameters(), lr=1e-3, master_weight_bits=24)
    model(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    torch.save(optimizer.get_fp32_model_state_dict(model), tmp_path / "checkpoint.pt")
    fp32_state_dict = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    optimizer.set_fp32_model_state_dict(model, fp32_state_dict)


def test_gradient_release_as_documented():
    model = make()
    optimizer = FlashAdamW(model.parameters(), lr=1e-3, master_weight_bits=24)
    handle = enable_gradient_release(model, optimizer)
    for _ in range(2):
        loss = model(torch.randn(4, 128, dtype=torch.bfloat16)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.active
    handle.remove()


def test_fully_decoupled_decay_as_documented():
    """lr=1e-3, weight_decay=0.01 equals weight_decay=1e-5 with decouple_lr."""
    weights = []
    for options in ({"weight_decay": 0.01}, {"weight_decay": 1e-5, "decouple_lr": True}):
        p = nn.Parameter(torch.ones(2, 32))
        p.grad = torch.zeros_like(p)
        FlashAdamW([p], lr=1e-3, **options).step()
        weights.append(p.detach())
    torch.testing.assert_close(*weights)


def test_keywords_that_do_not_exist_are_refused():
    for cls in (hf_flashoptim.FlashAdam, FlashAdamW, FlashSGD, hf_flashoptim.FlashSGDW, hf_flashoptim.FlashLion):
        with pytest.raises(TypeError, match="amsgrad"):
            cls([nn.Parameter(torch.zeros(2))], amsgrad=True)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_needs_neither_transformers_nor_triton():
    code = """
import sys
for name in ("transformers", "triton"):
    sys.modules[name] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "transformers" else find(name, *a)
import torch, hf_flashoptim
p = torch.nn.Parameter(torch.zeros(2, 64)); p.grad = torch.ones_like(p)
hf_flashoptim.FlashAdamW([p]).step()
assert not hasattr(hf_flashoptim, "register_optimizers")
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


MODULES = sorted(
    path.relative_to(Path(hf_flashoptim.__file__).parent.parent).with_suffix("").as_posix().replace("/", ".")
    for path in Path(hf_flashoptim.__file__).parent.rglob("*.py")
    if path.parent.name != "kernels"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name.removesuffix(".__init__"))).failed == 0
