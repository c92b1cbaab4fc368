"""Model cards: what was trained, how, and what was measured; what was not measured is not in them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from .adapter_file import AdapterFile
from .checkpoint import poetx_layers
from .config import NO_BASE_ON_DISK, PoetXConfig
from .export import ExportSummary
from .ops.cayley import largest_singular_value

TEMPLATE = Path(__file__).with_name("card_template.md")
LOSS_PLOT = "loss.png"

# Between them lies the part of an adapter's card that is ours, whatever else the card says.
BEGIN, END = "<!-- poetx -->", "<!-- /poetx -->"
# Settings worth a line, in this order.
_SETTINGS = (
    "block",
    "permutation_group",
    "merge_interval",
    "init",
    "train_rest",
    "base_error_bits",
    "skew_dtype",
    "seed",
)
# Arguments of training that say where and how it ran, but not what was trained.
_UNINTERESTING = (
    "output_dir", "logging_dir", "run_name", "hub_", "push_to_hub", "report_to", "log", "disable_tqdm", "save_",
    "dataloader_", "use_cpu", "local_rank", "ddp_", "do_", "eval_on_start", "project", "trackio", "remove_unused",
    "include_", "skip_memory_metrics", "fsdp_plugin", "accelerator_config", "deepspeed_plugin", "resume_",
)  # fmt: skip


@dataclass
class CardFacts:
    """What a card may state. A field that is None or empty has no line in it.

    Attributes:
        title: of the card, and the model's name in its metadata.
        config: of the adapter.
        is_adapter: whether the card is that of an adapter, rather than of a merged checkpoint.
        base: folder or repository of the base model.
        license: as the Hub names it.
        license_name: for the license "other".
        license_link: for the license "other".
        datasets: names on the Hub.
        data: sentence about the data.
        merges: periodic merges that the weights have absorbed.
        steps: optimizer steps.
        sigma: largest singular value of a skew matrix Q.
        drift: largest relative drift of a singular value of a weight, see `orthogonality_report`.
        merge_error: largest relative rounding error of a merged weight.
        num_parameters: of the checkpoint.
        dtype: of the merged weights.
        architecture: class of the model.
        training: arguments of training, by name.
        log_history: of the Trainer, for the loss plot.
        evaluations: for the table and the metadata.
        reproduce: commands.
    """

    title: str
    config: PoetXConfig
    is_adapter: bool = False
    base: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    datasets: list[str] = field(default_factory=list)
    data: str | None = None
    merges: int | None = None
    steps: int | None = None
    sigma: float | None = None
    drift: float | None = None
    merge_error: float | None = None
    num_parameters: int | None = None
    dtype: str | None = None
    architecture: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    log_history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[EvalResult] = field(default_factory=list)
    reproduce: str | None = None
    loss_plot: str | None = None

    @classmethod
    def of_adapter(cls, adapter: AdapterFile, title: str) -> "CardFacts":
        """What an adapter's folder says: its configuration, merges, steps, sigma, and the Trainer's log beside it."""
        figures = adapter.figures()
        steps = adapter.tensors.get("base_model.poetx_step")
        facts = cls(title, adapter.config, is_adapter=True, base=adapter.base_name)
        facts.merges = max(layer.merges for layer in figures)
        facts.sigma = max(layer.sigma for layer in figures)
        # The Trainer counts in its own state; the adapter's counter is that of hand-written loops.
        facts.steps = int(steps.read()) or None if steps else None
        state = adapter.folder / "trainer_state.json"
        if state.exists():
            saved = json.loads(state.read_text())
            facts.log_history, facts.steps = saved["log_history"], saved["global_step"]
        return facts

    @classmethod
    def of_export(cls, summary: ExportSummary, title: str) -> "CardFacts":
        """What `merge_checkpoint` found out: all of `of_adapter`, the merge error, and the base model's license.

        Raises:
            ValueError: for the summary of a live model; use `of_model` for it.
        """
        if summary.adapter is None:
            raise ValueError("the summary is that of a live model; use CardFacts.of_model(model, title)")
        facts = cls.of_adapter(summary.adapter, title)
        facts.is_adapter, facts.base = False, summary.base
        facts._add_export(summary)
        return facts

    @classmethod
    def of_model(cls, model: nn.Module, title: str, summary: ExportSummary | None = None) -> "CardFacts":
        """What a live model says, and its export if given."""
        tuner = next(module for module in model.modules() if getattr(module, "prefix", None) == "poetx_")
        name = tuner.active_adapters[0]
        config = tuner.peft_config[name]
        facts = cls(title, config, is_adapter=summary is None, base=_known_base(config))
        layers = [layer for _, layer in poetx_layers(tuner) if name in layer.poetx_config]
        facts.merges = max(int(layer.poetx_merge_count[name]) for layer in layers)
        facts.steps = int(tuner.poetx_step[name]) or None
        parameters = [parameter for layer in layers for parameter in layer.skew_parameters(name)]
        # A sharded one takes all ranks to measure, but only the first writes cards.
        if not any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in parameters):
            with torch.no_grad():
                facts.sigma = max(largest_singular_value(parameter).max().item() for parameter in parameters)
        facts.architecture = type(tuner.model).__name__
        if summary is not None:
            facts._add_export(summary)
        return facts

    def _add_export(self, summary: ExportSummary) -> None:
        config = json.loads((summary.folder / "config.json").read_text())
        self.architecture = (config.get("architectures") or [None])[0]
        self.dtype = config.get("dtype") or config.get("torch_dtype")
        self.merge_error, self.num_parameters = summary.largest_error, summary.num_parameters
        self._add_license(summary.base)

    def _add_license(self, base: str | None) -> None:
        """Take the license from the base model's own card, if that is at hand."""
        card = Path(base or "") / "README.md"
        if base and card.is_file():
            data = ModelCard.load(card, ignore_metadata_errors=True).data
            self.license, self.license_name = data.get("license"), data.get("license_name")
            self.license_link = data.get("license_link")

    def add_trainer(self, trainer: Trainer) -> None:
        """Add the arguments of a training that differ from the defaults, and its log."""
        self.training = training_arguments(trainer.args)
        self.log_history, self.steps = list(trainer.state.log_history), trainer.state.global_step

    @property
    def base_on_hub(self) -> str | None:
        """The base model's repository, None where it is a folder of this machine."""
        return None if self.base is None else hub_name(self.base)

    @property
    def base_link(self) -> str:
        """The base model for a sentence."""
        if self.base_on_hub:
            return f"[{self.base}](https://huggingface.co/{self.base})"
        return f"`{Path(self.base).name}`"

    @property
    def usage(self) -> str:
        """Code that loads the model."""
        name = (
            self.architecture if self.architecture and "CausalLM" not in self.architecture else "AutoModelForCausalLM"
        )
        if not self.is_adapter:
            return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("{self.title}")'
        return (
            "import hf_poetx  # before the adapter is loaded: it tells PEFT of the method\n"
            "from peft import PeftModel\n"
            f"from transformers import {name}\n\n"
            f"{self._base_code(name)}\n"
            f'model = PeftModel.from_pretrained(base, "{self.title}")'
        )

    def _base_code(self, name: str) -> str:
        if self.base is not None:
            return f'base = {name}.from_pretrained("{self.base_on_hub or Path(self.base).name}")'
        return (
            f'config = hf_poetx.PoetXConfig.from_pretrained("{self.title}")\n'
            f"base = {name}.from_config(AutoConfig.for_model(**config.base_config))"
        ).replace("base =", "from transformers import AutoConfig\nbase =", 1)

    def lines(self) -> list[str]:
        """The method's settings and what was measured, a line for each."""
        settings = {name: getattr(self.config, name) for name in _SETTINGS}
        lines = [f"- {name}: {value}" for name, value in settings.items() if value is not None]
        measured = {
            "optimizer steps": self.steps,
            "periodic merges absorbed by the weights": self.merges,
            "largest singular value of a skew matrix Q": _figure(self.sigma),
            "largest defect of a block from orthogonality (2 sigma^4 - sigma^8)": _figure(
                None if self.sigma is None else 2 * self.sigma**4 - self.sigma**8
            ),
            "largest drift of a singular value of a weight": _figure(self.drift),
            "largest relative rounding error of a merged weight": _figure(self.merge_error),
            "dtype": self.dtype,
            "parameters": None if self.num_parameters is None else f"{self.num_parameters:,}",
        }
        return lines + [f"- {name}: {value}" for name, value in measured.items() if value is not None]

    def metadata(self) -> ModelCardData:
        """The card's header, with evaluations as `model-index`."""
        causal = self.architecture is not None and "CausalLM" in self.architecture
        return ModelCardData(
            base_model=self.base_on_hub,
            base_model_relation=None if self.base_on_hub is None or self.is_adapter else "finetune",
            datasets=self.datasets or None,
            eval_results=self.evaluations or None,
            library_name="peft" if self.is_adapter else "transformers",
            license=self.license,
            license_name=self.license_name,
            license_link=self.license_link,
            model_name=self.title.rpartition("/")[2],
            pipeline_tag="text-generation" if causal else None,
            tags=["poetx", *(["from-scratch"] if self.base is None else [])],
        )


def hub_name(name: str) -> str | None:
    """The name of a model if it can be one of the Hub's, None if it is that of a folder."""
    if Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _known_base(config: PoetXConfig) -> str | None:
    name = config.base_model_name_or_path
    return None if not name or name == NO_BASE_ON_DISK else name


def training_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Arguments that shape the result and differ from the defaults, and the basic ones in any case."""
    basic = ("learning_rate", "per_device_train_batch_size", "optim", "lr_scheduler_type", "seed")
    defaults = {f.name: f.default for f in args.__dataclass_fields__.values()}
    values = args.to_dict()
    return {
        name: value
        for name, value in values.items()
        if not name.startswith(_UNINTERESTING)
        and (name in basic or (value not in (None, defaults.get(name)) and not isinstance(value, dict | list)))
    }


def section(facts: CardFacts) -> str:
    """The part of a card about the method, between marks."""
    about = (
        "POET-X trains the linear layers through block-diagonal orthogonal transforms on both sides of their weights, "
        "which stay frozen and keep their singular values."
    )
    usage = ["", "```python", facts.usage, "```"]
    merge = ["", "`poetx merge ADAPTER OUT` makes a plain checkpoint of it."] if facts.is_adapter else []
    return "\n".join([BEGIN, "## Method", "", about, "", *facts.lines(), *usage, *merge, END])


def write_card(folder: str | Path, facts: CardFacts) -> Path:
    """Write ``README.md``, and ``loss.png`` where the training's log is known, into a folder.

    Returns:
        The card's path.
    """
    folder = Path(folder)
    if plot_loss(facts.log_history, folder / LOSS_PLOT):
        facts.loss_plot = LOSS_PLOT
    card = ModelCard.from_template(facts.metadata(), template_path=str(TEMPLATE), facts=facts, section=section(facts))
    card.save(folder / "README.md")
    return folder / "README.md"


def plot_loss(log_history: list[dict[str, Any]], file: Path) -> bool:
    """Draw training and evaluation loss by optimizer step; False, and no file, if fewer than two were logged."""
    curves = {
        name: [(entry["step"], entry[key]) for entry in log_history if key in entry]
        for name, key in (("training", "loss"), ("evaluation", "eval_loss"))
    }
    if len(curves["training"]) < 2:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True
