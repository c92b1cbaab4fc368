"""The spectrum over many merges, and the report of it."""

import pytest
import torch
from torch import nn

from hf_poetx import OrthogonalityCallback, PoetXConfig, get_poetx_model, merge_then_reinitialize, orthogonality_report
from hf_poetx.layer import PoetXLayer
from hf_poetx.ops.skew import unpack_skew
from hf_poetx.optimizer import trainable_skew
from hf_poetx.report import spectrum_drift
from tests.poetx_training import layers_of, make_trainer, tiny_poetx


def one_layer(width: int, block: int, dtype: torch.dtype, **options) -> PoetXLayer:
    base = nn.Sequential(nn.Linear(width, width, bias=False)).to(dtype)
    nn.init.normal_(base[0].weight, std=width**-0.5)
    model = get_poetx_model(base, PoetXConfig(block=block, track_spectrum=True, **options))
    return layers_of(model)[0]


def merge_often(layer: PoetXLayer, merges: int, q: float, exact: bool) -> tuple[float, float]:
    """Drift and relative norm after merges of random skew entries of standard deviation q."""
    start = layer.poetx_start_spectrum["default"].clone()
    for _ in range(merges):
        for parameter in layer.skew_parameters("default"):
            nn.init.normal_(parameter, std=q)
        if exact:
            layer.merge_then_reinitialize("default")
        else:
            layer._set_natural_weight(layer.effective_weight("default"))
            layer.reinitialize("default")
    weight = layer.base_weight("default").float()
    return spectrum_drift(weight, start), (weight.norm() / start.norm()).item()


# Bounds for 1000 merges of a 512 x 512 weight in blocks of 128 with q = 0.01.
KINDS = {
    "bf16": (torch.bfloat16, {}, 0.01),
    "bf16-error-bits": (torch.bfloat16, {"base_error_bits": 8}, 2e-4),
    "fp32": (torch.float32, {}, 1e-5),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_hundred_exact_merges_keep_the_spectrum(kind, seed):
    """The same singular values of Q, 2 q sqrt(block) = 0.226, at an eighth of the width.

    Roundings of entries are independent, so they move a singular value by a random walk, whose size against the mean
    singular value goes as the root of the merges over the width.
    """
    torch.manual_seed(seed)
    dtype, options, bound = KINDS[kind]
    bound *= (100 / 1000 * 512 / 64) ** 0.5
    drift, norm = merge_often(one_layer(64, 32, dtype, **options), merges=100, q=0.02, exact=True)
    assert drift <= bound and norm == pytest.approx(1, abs=bound)


@pytest.mark.parametrize("seed", range(3))
def test_norm_is_that_of_the_start_but_for_the_last_rounding(seed):
    """Rounding at every merge takes 1.4e-6 of the norm, in all 1.4e-4 without the scaling to the norm at the start.

    The last rounding alone moves 256^2 entries by up to 2^-8 of each, at random: 3 standard deviations of 2^-8 / 256.
    """
    torch.manual_seed(seed)
    layer = one_layer(256, 64, torch.bfloat16)
    start = layer.base_weight().double().norm()
    merge_often(layer, merges=100, q=0.014, exact=True)
    assert abs(layer.base_weight().double().norm() / start - 1).item() <= 3 * 2**-8 / 256


def test_norm_to_keep_is_that_of_the_weights_at_the_first_merge():
    """Sharded loading wraps a model on most ranks before its weights are there."""
    layer = one_layer(16, 8, torch.float32)
    layer.poetx_start_frobenius["default"].fill_(float("nan"))
    before = layer.base_weight().norm()
    merge_often(layer, merges=2, q=0.02, exact=True)
    assert torch.allclose(layer.base_weight().norm(), before, rtol=1e-6)


def test_hundred_polynomial_merges_lose_it():
    """The control: what the forward pass computes is not orthogonal enough to be merged again and again."""
    drift, norm = merge_often(one_layer(64, 32, torch.bfloat16), merges=100, q=0.02, exact=False)
    assert drift > 0.1 and norm < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_thousand_exact_merges_keep_the_spectrum(kind, seed):
    torch.manual_seed(seed)
    dtype, options, bound = KINDS[kind]
    drift, norm = merge_often(one_layer(512, 128, dtype, **options), merges=1000, q=0.01, exact=True)
    assert drift <= bound and norm == pytest.approx(1, abs=bound)


@pytest.mark.slow
def test_thousand_polynomial_merges_lose_it():
    drift, norm = merge_often(one_layer(512, 128, torch.bfloat16), merges=1000, q=0.01, exact=False)
    assert drift > 0.5 and norm < 0.6


def test_report_of_an_untrained_model_is_exact():
    report = orthogonality_report(tiny_poetx())
    assert [layer.sigma for layer in report.layers] == [0.0] * 4
    assert report.largest("defect") == 0.0 and report.largest("drift") <= 1e-6
    assert all(layer.norm == pytest.approx(1, abs=1e-6) for layer in report.layers)


def test_report_gives_the_defect_of_the_forward_pass():
    """`2 sigma^4 - sigma^8` is the largest singular value of G G^T - I."""
    model = tiny_poetx()
    for parameter in trainable_skew(model):
        nn.init.normal_(parameter, std=0.05)
    report = orthogonality_report(model)
    for layer, figures in zip(layers_of(model), report.layers, strict=True):
        skews = [unpack_skew(parameter.detach().double()) for parameter in layer.skew_parameters("default")]
        sigma = max(torch.linalg.matrix_norm(skew, 2).max().item() for skew in skews)
        # Power iteration comes from below, to a few percent.
        assert 0.95 * sigma <= figures.sigma <= sigma * (1 + 1e-6)
        blocks = [torch.eye(q.shape[-1]) + 2 * (q + q @ q + q @ q @ q) + q @ q @ q @ q for q in skews]
        defects = [torch.linalg.matrix_norm(g @ g.mT - torch.eye(g.shape[-1]), 2).max().item() for g in blocks]
        assert max(defects) == pytest.approx(2 * sigma**4 - sigma**8, rel=1e-6)
        assert figures.defect == pytest.approx(max(defects), rel=0.2)
        assert figures.drift > 0


def test_report_is_a_table_of_layers():
    model = tiny_poetx(track_spectrum=True)
    merge_then_reinitialize(model)
    lines = str(orthogonality_report(model)).splitlines()
    assert lines[0].split() == ["layer", "merges", "sigma", "defect", "norm", "drift"]
    assert [line.split()[0] for line in lines[1:]] == [layer.canonical_name for layer in layers_of(model)]
    assert {line.split()[1] for line in lines[1:]} == {"1"}
    assert len({len(line) for line in lines}) == 1, "columns are aligned"


def test_drift_is_said_to_be_unknown_after_untracked_merges():
    model = tiny_poetx()
    merge_then_reinitialize(model)
    report = orthogonality_report(model)
    assert report.largest("drift") is None
    assert "track_spectrum=False" in str(report)
    tracked = tiny_poetx(track_spectrum=True)
    merge_then_reinitialize(tracked)
    assert orthogonality_report(tracked).largest("drift") <= 1e-6
    assert orthogonality_report(tracked, spectrum=False).largest("drift") is None


def test_report_is_plain_numbers_for_json():
    import json

    figures = json.loads(json.dumps(orthogonality_report(tiny_poetx()).to_dict()))
    assert len(figures["layers"]) == 4 and figures["layers"][0]["sigma"] == 0.0


def test_report_does_not_depend_on_the_users_precision():
    model = tiny_poetx()
    for parameter in trainable_skew(model):
        nn.init.normal_(parameter, std=0.02)
    plain = orthogonality_report(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert orthogonality_report(model).to_dict() == plain.to_dict()


def test_callback_adds_figures_to_every_training_log(tmp_path):
    # A rate at which the polynomial is nearly orthogonal.
    model = tiny_poetx(track_spectrum=True, merge_interval=2, poet_scale=0.05)
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
    trainer = make_trainer(model, tmp_path, callbacks=[OrthogonalityCallback(spectrum=True)], **arguments)
    for _ in range(2):
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["step"] for entry in logs] == [1, 2, 3]
        assert all({"poetx/sigma", "poetx/defect", "poetx/drift", "poetx/norm"} <= entry.keys() for entry in logs)
        assert logs[0]["poetx/sigma"] > 0 and logs[1]["poetx/sigma"] == 0.0, "the second step has merged"
        assert all(entry["poetx/drift"] < 1e-3 for entry in logs)
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations and not any("poetx/sigma" in entry for entry in evaluations)


def test_callback_leaves_other_models_alone(tmp_path):
    from tests.poetx_training import tiny_llama

    trainer = make_trainer(tiny_llama(), tmp_path, callbacks=[OrthogonalityCallback()], max_steps=1)
    trainer.train()
    assert not any("poetx/sigma" in entry for entry in trainer.state.log_history)
