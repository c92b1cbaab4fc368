"""A real pretrained model, SmolLM2-135M: widths 576, 1536 and 192, of which block 256 divides only one.

Set SMOLLM2 to the folder that `python examples/smollm2.py FOLDER` fills with its weights; skipped otherwise.
"""

import os

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from hf_poetx import PoetXConfig, get_poetx_model, merge_then_reinitialize, orthogonality_report
from hf_poetx.checkpoint import poetx_layers
from tests.poetx.helpers import randomize_skew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SMOLLM2" not in os.environ, reason="SMOLLM2 names no folder with the real weights"),
]


def load() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(os.environ["SMOLLM2"], dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(1000, 1064)[None]).logits


@pytest.fixture(scope="module")
def base_logits() -> torch.Tensor:
    return logits(load())


def test_wrapping_changes_nothing_bit_for_bit(base_logits):
    model = get_poetx_model(load(), PoetXConfig())
    layers = dict(poetx_layers(model))
    assert len(layers) == 30 * 7
    assert {layer.width(side) for layer in layers.values() for side in ("in", "out")} == {576, 1536, 192}
    assert torch.equal(logits(model), base_logits)


def test_merged_outputs_equal_unmerged_ones(base_logits, record_property):
    model = randomize_skew(get_poetx_model(load(), PoetXConfig()), sigma=0.1)
    before = logits(model)
    after = logits(model.merge_and_unload())
    difference = (after - before).abs().max().item()
    record_property("largest difference of a logit", difference)
    print(f"merged against unmerged: {difference:.2e}, logits up to {before.abs().max().item():.1f}")
    assert difference <= 1e-3, "fp32 rounding through 30 layers, on logits of the size of thirty"
    assert (before - base_logits).abs().max() > 1


def test_a_periodic_merge_keeps_the_spectrum_and_the_checkpoint_is_exact(tmp_path):
    # Two of thirty layers: singular values of all would take minutes.
    config = PoetXConfig(track_spectrum=True, layers_to_transform=[0, 29])
    model = randomize_skew(get_poetx_model(load(), config), sigma=0.1)
    before = logits(model)
    report = merge_then_reinitialize(model)
    after = logits(model)
    drift = orthogonality_report(model).largest("drift")
    print(f"jump {report.max_jump:.2e}, sigma {report.max_sigma:.3f}, drift {drift:.2e}, "
          f"logits moved by {(after - before).abs().max().item():.2e}")  # fmt: skip
    assert drift <= 1e-4 and report.max_jump <= 3 * report.max_sigma**4
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(load(), tmp_path)), after)
