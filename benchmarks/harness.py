"""Interleaved measurements: all contestants run in every round of one process, so ratios share the machine's state."""

import datetime
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

RESULTS = Path(__file__).parent / "results"


def measure(
    contestants: dict[str, Callable[[], object]], baseline: str, rounds: int = 12, seconds: float = 0.02
) -> dict:
    """Time contestants back to back, in turn, and give each one's ratio to the baseline of the same round.

    The order is another one in every round, since what ran before decides how much power and heat the GPU has to spare.

    Args:
        contestants: what to call, by name.
        baseline: name of the contestant that the ratios are to.
        rounds: at least 10, so that the quantiles mean something.
        seconds: how long a contestant runs in each round, at least 3 calls.

    Returns:
        By name: `milliseconds`, `ratio`, `ratio_20` and `ratio_80` (median and quantiles over the rounds), and
        `peak_bytes`, the most memory allocated during a call beyond what was allocated before it.
    """
    calls = {name: max(3, round(seconds / _time(call, 5) * 1e3)) for name, call in contestants.items()}
    times = {name: [] for name in contestants}
    order, shuffle = list(contestants), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(_time(contestants[name], calls[name]))
    result = {}
    for name, call in contestants.items():
        ratios = torch.tensor(times[name]) / torch.tensor(times[baseline])
        low, median, high = ratios.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        result[name] = {
            "milliseconds": torch.tensor(times[name]).median().item(),
            "ratio": median,
            "ratio_20": low,
            "ratio_80": high,
            "peak_bytes": _peak_bytes(call),
        }
    return result


def graph(call: Callable[[], object]) -> Callable[[], object]:
    """The same work replayed from a CUDA graph: what is left without the host's part."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured.replay


def environment() -> dict:
    """What a figure depends on: GPU (None without one), driver, versions, commit, command and date."""
    gpu = torch.cuda.is_available()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    commit = os.environ.get("BENCHMARK_COMMIT") or _output(["git", "rev-parse", "HEAD"])
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _output(query).splitlines()[0] if gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "command": _command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(name: str, results: object, folder: Path | None = None) -> None:
    """Write results with the environment to `benchmarks/results/NAME.json`, or below the folder given."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "results": results}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def earlier_rows(name: str, folder: Path | None = None) -> list[dict]:
    """Rows that `benchmarks/results/NAME.json`, or the file below the folder given, has from other runs.

    Raises:
        ValueError: if it was written on another GPU or with other versions, which cannot share a file.
    """
    path = (folder or RESULTS) / f"{name}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    here = environment()
    different = {key: content["environment"][key] for key in ("gpu", "torch", "triton")}
    different = {key: value for key, value in different.items() if value != here[key]}
    if different:
        raise ValueError(f"{path} is from {different}, unlike this run; move it away, or give another --output")
    run = {key: content["environment"][key] for key in ("commit", "command", "date")}
    return [{**row, "run": row.get("run", run)} for row in content["results"]]


def write_rows(
    name: str, rows: list[dict], earlier: list[dict], key: Sequence[str], folder: Path | None = None
) -> None:
    """Write rows of this run, and those of earlier runs that none of them replaces; each says what run it is from.

    Args:
        name: of the file.
        rows: of this run; each counts under the values of `key`, and several may share them.
        earlier: from `earlier_rows`.
        key: fields that say what a row measured; one that a row lacks is False.
        folder: where the file goes.
    """
    run = {key: value for key, value in environment().items() if key in ("commit", "command", "date")}
    measured = {tuple(row.get(field, False) for field in key) for row in rows}
    kept = [row for row in earlier if tuple(row.get(field, False) for field in key) not in measured]
    write(name, [*kept, *({**row, "run": run} for row in rows)], folder)


def _time(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds a call, of `repeats` calls back to back."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _peak_bytes(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _command() -> str:
    """The command as given, without where its output went."""
    arguments = sys.argv[1:]
    if "--output" in arguments:
        position = arguments.index("--output")
        del arguments[position : position + 2]
    return shlex.join(["python", sys.argv[0], *arguments])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
