"""The command line: ``poetx merge``, ``poetx report``, ``poetx estimate``."""

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import estimate as memory
from .adapter_file import ADAPTER_CONFIG, AdapterFile
from .adapter_report import measure_layers
from .card import CardFacts, write_card
from .export import ExportSummary, merge_checkpoint
from .publish import push_folder

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in list(_DTYPES.values())}

_MERGE = """\
Write an adapter and its base model as one plain checkpoint, which loads without hf_poetx: with
AutoModelForCausalLM, pipeline, vLLM, or a GGUF converter.

ADAPTER is a folder that save_pretrained wrote, a Trainer's checkpoint-N, or a repository on the Hub.
The base model is the one that the adapter names, unless --base says otherwise; an adapter of a model trained
from scratch holds everything itself. The weights are computed in fp32, one layer in memory at a time, and
written under the base model's tensor names, shapes and dtypes. OUT appears when it is whole.
"""
_MERGE_EXAMPLES = """\
examples:
  poetx merge out/checkpoint-600 merged
  poetx merge user/my-adapter merged --dtype bf16 --push-to-hub user/my-model --private
  poetx merge out/checkpoint-600 merged --base /models/llama   # the base model has moved
"""
_REPORT = """\
Show for each layer of an adapter:
  merges   periodic merges that its weight has absorbed
  sigma    largest singular value of a skew matrix Q: how far the rotations have gone since the last merge
           (above 0.5 a merge changes the function visibly: lower the learning rate or merge_interval)
  defect   2 sigma^4 - sigma^8: how far the blocks are from orthogonal
and with --spectrum, which reads the weights:
  norm     of the weight against the start (1 if nothing was lost)
  drift    largest change of a singular value against the mean at the start (0.01 is the promise)
"""
_ESTIMATE = """\
Estimate the peak memory of one training step, by part, and say on which GPU it fits.

MODEL is a folder or repository with a config.json, or the size of a Llama: 1B, 3B, 7B, 8B, 13B, 70B.
"""
_ESTIMATE_EXAMPLES = """\
examples:
  poetx estimate 8B
  poetx estimate 8B --sequence 4096 --batch 2 --memory-mode mem --checkpointing --chart memory.png
  poetx estimate ./my-model --method full --optimizer adamw    # full training, to compare
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="poetx",
        description="Tools for POET-X adapters: merge them into plain models, inspect them, plan their training.",
        epilog="`poetx COMMAND --help` explains a command and gives examples.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_merge(commands)
    _add_report(commands)
    _add_estimate(commands)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str, description: str, examples: str = ""):
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_merge(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "merge", "adapter + base model -> plain checkpoint", _MERGE, _MERGE_EXAMPLES)
    parser.set_defaults(run=run_merge)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder, Trainer's checkpoint, or repository on the Hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--base", help="base model, if not the one that the adapter names: folder or repository")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of the checkpoint; default: as in the base model")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a weight file; default: 5GB")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model in OUT")
    parser.add_argument(
        "--no-check-base", dest="check_base", action="store_false", help="accept a base model with other weights"
    )
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="upload OUT afterwards")
    parser.add_argument("--private", action="store_true", help="the repository is to be private")
    parser.add_argument("--revision", help="branch to upload to")


def _add_report(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "report", "merges, sigma, defect and drift of each layer", _REPORT)
    parser.set_defaults(run=run_report)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder, Trainer's checkpoint, or repository on the Hub")
    parser.add_argument("--spectrum", action="store_true", help="read the weights and compute norm and drift as well")
    parser.add_argument("--base", help="base model, if not the one that the adapter names")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_estimate(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "estimate", "peak memory of training, by part", _ESTIMATE, _ESTIMATE_EXAMPLES)
    parser.set_defaults(run=run_estimate)
    parser.add_argument("model", metavar="MODEL", help="folder, repository, or size such as 8B")
    parser.add_argument("--method", choices=memory.METHODS, default="poetx", help="default: poetx")
    parser.add_argument("--block", type=int, default=256, help="size of the orthogonal blocks; default: 256")
    parser.add_argument("--rank", type=int, default=64, help="of LoRA; default: 64")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step and device; default: 1")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sequence; default: 1024")
    parser.add_argument(
        "--optimizer", choices=sorted(memory.OPTIMIZERS), default="flash_adamw", help="default: flash_adamw"
    )
    parser.add_argument("--memory-mode", choices=("fast", "mem"), default="fast", help="of POET-X; default: fast")
    parser.add_argument("--train-rest", action="store_true", help="embeddings, norms and head are trained in place")
    parser.add_argument("--checkpointing", action="store_true", help="activation (gradient) checkpointing")
    parser.add_argument("--gradient-release", action="store_true", help="step inside the backward pass")
    parser.add_argument("--accumulation", type=int, default=1, help="forward passes for a step; default: 1")
    parser.add_argument("--error-bits", action="store_true", help="8 more bits of every base weight")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw a bar chart, such as memory.png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_merge(args: argparse.Namespace, console: Console) -> None:
    """``poetx merge``."""
    columns = (
        TextColumn("merging"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    if (args.private or args.revision) and not args.push_to_hub:
        raise ValueError("--private and --revision are of a push; add --push-to-hub USER/NAME, or leave them out")
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("", total=None)
    # Even a bar that is disabled leaves an empty line where the output is no terminal.
    with progress if console.is_terminal else contextlib.nullcontext():
        summary = merge_checkpoint(
            args.adapter,
            args.out,
            base=args.base,
            dtype=_DTYPES.get(args.dtype),
            max_shard_size=args.max_shard_size,
            check_base=args.check_base,
            overwrite=args.overwrite,
            on_progress=lambda p: progress.update(task, completed=p.number, total=p.total, description=p.name),
        )
    facts = CardFacts.of_export(summary, args.push_to_hub or args.out.name)
    facts.reproduce = f"poetx merge ADAPTER OUT{f' --dtype {args.dtype}' if args.dtype else ''}"
    write_card(args.out, facts)
    _print_summary(console, summary)
    if args.push_to_hub:
        console.print(f"pushed: {_push(args)}", soft_wrap=True)


def _push(args: argparse.Namespace) -> str:
    """Upload what was merged; the address of the commit."""
    try:
        return push_folder(args.out, args.push_to_hub, private=args.private or None, revision=args.revision).commit_url
    except (RuntimeError, OSError, ValueError) as error:
        raise OSError(
            f"{error}\nThe merged model is whole in {args.out}; what arrived is not sent again when you push it with: "
            f"hf upload {args.push_to_hub} {args.out}"
        ) from error


def _print_summary(console: Console, summary: ExportSummary) -> None:
    table = Table("layer", "merge error", box=None)
    for layer in summary.layers:
        table.add_row(layer.name, f"{layer.error:.2e}")
    console.print(table)
    console.print("merge error: relative rounding error of the stored weight against the fp32 one")
    if summary.unchecked:
        console.print(f"{summary.unchecked} layers could not be compared with the weights that were trained on")
    console.print(
        f"wrote {summary.num_parameters:,} parameters, {decimal(summary.num_bytes)}, to {summary.folder} "
        f"(largest merge error {summary.largest_error:.2e})",
        soft_wrap=True,
    )


def run_report(args: argparse.Namespace, console: Console) -> None:
    """``poetx report``."""
    if args.base and not args.spectrum:
        raise ValueError("--base is read for --spectrum only; add it, or leave --base out")
    adapter = AdapterFile.open(args.adapter)
    layers = measure_layers(adapter, args.base) if args.spectrum else adapter.figures()
    if args.json:
        console.print_json(json.dumps([layer._asdict() for layer in layers]))
        return
    table = Table(*layers[0]._fields, box=None)
    for layer in layers:
        table.add_row(*map(_cell, layer))
    console.print(table)
    figures = ("sigma", "defect", "drift") if args.spectrum else ("sigma", "defect")
    known = {name: [value for layer in layers if (value := getattr(layer, name)) is not None] for name in figures}
    largest = ", ".join(f"{name} {_cell(max(values))}" for name, values in known.items() if values)
    console.print(f"{len(layers)} layers, block {adapter.config.block}; largest {largest}", soft_wrap=True)
    if args.spectrum and not known["drift"]:
        console.print("drift is unknown: the weights were merged into, and track_spectrum was not set in training")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run_estimate(args: argparse.Namespace, console: Console) -> None:
    """``poetx estimate``."""
    plan = memory.Training(
        method=args.method,
        block=args.block,
        rank=args.rank,
        batch=args.batch,
        sequence=args.sequence,
        optimizer=args.optimizer,
        memory_mode=args.memory_mode,
        train_rest=args.train_rest,
        checkpointing=args.checkpointing,
        gradient_release=args.gradient_release,
        accumulation=args.accumulation,
        error_bits=args.error_bits,
    )
    result = memory.estimate(_model_shape(args.model), plan)
    if args.json:
        console.print_json(json.dumps(result.to_dict()))
    else:
        console.print(_estimate_table(result))
        fits = ", ".join(f"{size} GB: {'yes' if result.fits(size) else 'no'}" for size in memory.GPU_SIZES)
        console.print(f"peak: {_gib(result.peak)} GiB. Fits on a GPU of {fits}")
    if args.chart:
        memory.draw(result, args.chart, f"{args.model}, {args.method}, {args.batch} x {args.sequence} tokens")
        console.print(f"chart: {args.chart}", soft_wrap=True)


def _model_shape(model: str) -> memory.ModelShape:
    if (Path(model) / ADAPTER_CONFIG).exists():
        raise ValueError(f"{model} is an adapter; name its base model, or a size such as 8B")
    try:
        return memory.model_shape(model)
    except OSError as error:
        raise FileNotFoundError(
            f"{model!r} is neither a folder with a config.json, nor a model that the Hub gives, nor a size (1B, 3B, 7B, "
            "8B, 13B, 70B)"
        ) from error


def _estimate_table(result: memory.Estimate) -> Table:
    table = Table("part", "backward begins", "optimizer steps", title="GiB", box=None, show_footer=True)
    moments = (result.backward, result.step)
    for name in result.backward | result.step:
        table.add_row(name, *(_gib(moment[name]) if name in moment else "-" for moment in moments))
    table.columns[0].footer = "total"
    for column, moment in zip(table.columns[1:], moments, strict=True):
        column.justify, column.footer = "right", _gib(sum(moment.values()))
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the entry point of ``poetx``.

    Returns:
        0 if all went well, 1 after an error, which is printed in one line, 130 if interrupted.
    """
    args = build_parser().parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        args.run(args, Console())
    except KeyboardInterrupt:
        print("interrupted; nothing is left half-written", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError) as error:
        print(f"poetx {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
