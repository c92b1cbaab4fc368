"""The command line: what it writes, prints, and says when something is wrong."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_poetx import cli, orthogonality_report
from hf_poetx.tensor_file import checkpoint_tensors
from tests.poetx_adapters import write_adapter, write_base
from tests.poetx_training import tiny_llama


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("command", [[], ["merge"], ["report"], ["estimate"]], ids=lambda c: " ".join(c) or "poetx")
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0 and len(text) > 400
    assert command == [] or "poetx " + command[0] in text


def test_every_option_has_a_help_text():
    parser = cli.build_parser()
    commands = next(action for action in parser._actions if action.dest == "command").choices
    for name, command in commands.items():
        assert [action.dest for action in command._actions if not action.help] == [], name


def test_merge_writes_a_model_and_prints_each_layers_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_adapter(write_base(tiny_llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    command = [
        "merge",
        str(tmp_path / "adapter"),
        str(tmp_path / "out"),
        "--dtype",
        "bf16",
        "--max-shard-size",
        "20KB",
    ]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    layers = re.findall(r"(model\.layers\.\d\.\S+)\s+(\d\.\d\de-\d\d)", printed)
    assert len(layers) == 14 and all(2**-11 < float(error) < 2**-9 for _, error in layers)
    assert {stored.dtype for stored in checkpoint_tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert "poetx" in ModelCard.load(tmp_path / "out/README.md").data.tags


@pytest.mark.parametrize("spectrum", [False, True])
@pytest.mark.parametrize("merges", [0, 1])
def test_report_agrees_with_that_of_the_live_model(
    spectrum: bool, merges: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = write_base(tiny_llama(), tmp_path / "base")
    wrapped = write_adapter(base, tmp_path / "adapter", merges=merges, track_spectrum=True)
    arguments = ["report", str(tmp_path / "adapter"), "--json", *(["--spectrum"] if spectrum else [])]
    assert cli.main(arguments) == 0
    printed = {layer["name"]: layer for layer in json.loads(capsys.readouterr().out)}
    for layer in orthogonality_report(wrapped).layers:
        for figure in ("merges", "sigma", "defect", *(["norm", "drift"] if spectrum else [])):
            # Singular values of a weight computed twice, in chunks or not.
            assert printed[layer.name][figure] == pytest.approx(getattr(layer, figure), rel=1e-4, abs=1e-6)
    assert cli.main(arguments[:2]) == 0
    text = capsys.readouterr().out
    assert f"14 layers, block 8; largest sigma {max(layer['sigma'] for layer in printed.values()):.3g}" in text


def test_report_says_where_drift_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_adapter(write_base(tiny_llama(), tmp_path / "base"), tmp_path / "adapter", merges=1)
    assert cli.main(["report", str(tmp_path / "adapter"), "--spectrum"]) == 0
    assert "drift is unknown" in capsys.readouterr().out


def test_output_that_is_no_terminal_has_no_trace_of_the_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_adapter(write_base(tiny_llama(), tmp_path / "base"), tmp_path / "adapter")
    capsys.readouterr()
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.lstrip(" ").startswith("layer") and " kB, to " in text


def test_estimate_prints_parts_and_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", "8B", "--train-rest", "--chart", str(tmp_path / "memory.png")]) == 0
    printed = capsys.readouterr().out
    for part in ("weights", "skew entries", "gradients", "optimizer states", "activations"):
        assert re.search(rf"{part}.*\d+\.\d\d", printed)
    assert "24 GB: no, 48 GB: yes, 80 GB: yes, 141 GB: yes" in printed
    assert (tmp_path / "memory.png").exists()
    tiny_llama().config.save_pretrained(tmp_path / "model")
    assert cli.main(["estimate", str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] < 2**30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "absent", "out"], "neither a folder nor a model"),
        (["merge", "ADAPTER", "OUT", "--max-shard-size", "much"], "no size"),
        (["merge", "ADAPTER", "OUT", "--base", "absent"], "base model 'absent'"),
        (["report", "BASE"], "whole model, without an adapter"),
        (["estimate", "8B", "--block", "0"], "block=0"),
        (["merge", "ADAPTER", "OUT", "--private"], "add --push-to-hub"),
        (["merge", "ADAPTER", "OUT", "--revision", "main"], "add --push-to-hub"),
        (["merge", "PARENT", "OUT"], "name one of the adapters in it, "),
        (["report", "ADAPTER", "--base", "BASE"], "--base is read for --spectrum only"),
        (["estimate", "9B"], "nor a size (1B, 3B, 7B, 8B, 13B, 70B)"),
        (["estimate", "ADAPTER"], "is an adapter; name its base model"),
    ],
)
def test_errors_are_one_line_on_stderr(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_adapter(write_base(tiny_llama(), tmp_path / "base"), tmp_path / "adapter")
    places = {"ADAPTER": "adapter", "OUT": "out", "BASE": "base", "PARENT": "."}
    arguments = [str(tmp_path / places[argument]) if argument in places else argument for argument in arguments]
    capsys.readouterr()
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("poetx ") and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_interruption_is_told_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "merge_checkpoint", interrupt)
    assert cli.main(["merge", "adapter", str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
