"""Model cards: valid metadata, everything that was measured, and nothing that was not."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard

from hf_poetx import CardFacts, PoetXConfig, merge_checkpoint, write_card
from hf_poetx.adapter_card import complete_adapter_card
from hf_poetx.adapter_file import AdapterFile
from hf_poetx.card import TEMPLATE, training_arguments
from tests.poetx_adapters import write_adapter, write_base
from tests.poetx_training import layers_of, make_trainer, tiny_llama

ROOT = Path(__file__).parents[2]
LOG = [{"step": step, "loss": 4.0 - step / 10} for step in range(1, 6)] + [{"step": 5, "eval_loss": 3.6}]


def header(folder: Path) -> dict[str, Any]:
    """A card's metadata, as any YAML reader sees it."""
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def complete_facts() -> CardFacts:
    return CardFacts(
        title="user/model",
        config=PoetXConfig(block=256, merge_interval=200),
        base="org/base",
        license="apache-2.0",
        datasets=["org/data"],
        data="Speeches of the years 1790 to 2026.",
        merges=3,
        steps=600,
        sigma=0.25,
        drift=0.0012,
        merge_error=0.0017,
        num_parameters=1_234_567,
        dtype="bfloat16",
        architecture="LlamaForCausalLM",
        training={"learning_rate": 0.001},
        log_history=LOG,
        evaluations=[
            EvalResult(
                task_type="text-generation",
                dataset_type="org/test",
                dataset_name="Held-out speeches",
                dataset_split="test",
                metric_type="bits_per_byte",
                metric_value=0.9712,
            )
        ],
        reproduce="poetx merge ADAPTER OUT",
    )


def test_a_complete_card_states_everything(tmp_path: Path):
    write_card(tmp_path, complete_facts())
    text = (tmp_path / "README.md").read_text()
    for fact in (
        "block: 256", "merge_interval: 200", "optimizer steps: 600", "absorbed by the weights: 3", "Q: 0.25",
        "0.0078", "weight: 0.0012", "weight: 0.0017", "1,234,567", "bfloat16", "| learning_rate | 0.001 |", "loss.png",
        "Held-out speeches, test | bits_per_byte | 0.9712", "poetx merge ADAPTER OUT", "1790 to 2026",
        "[org/base](https://huggingface.co/org/base)", 'from_pretrained("user/model")',
    ):  # fmt: skip
        assert fact in text, fact
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metadata_has_base_license_and_evaluations_as_model_index(tmp_path: Path):
    write_card(tmp_path, complete_facts())
    metadata = header(tmp_path)
    assert metadata["base_model"] == "org/base" and metadata["base_model_relation"] == "finetune"
    assert metadata["license"] == "apache-2.0" and metadata["datasets"] == ["org/data"]
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    (result,) = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("bits_per_byte", 0.9712, "test")


# What a card says of each field, and no other.
TRACES = {
    "merges": "absorbed", "steps": "optimizer steps", "sigma": "singular value of a skew", "drift": "drift",
    "merge_error": "rounding error", "num_parameters": "parameters", "dtype": "dtype:", "training": "argument",
    "log_history": "loss.png", "evaluations": "Evaluation", "reproduce": "reproduce", "license": "license",
    "data": "1790", "datasets": "org/data",
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_what_is_not_known_has_no_line(name: str, tmp_path: Path):
    facts = complete_facts()
    if name != "log_history":
        facts.log_history = []
    facts.datasets = [] if name == "data" else facts.datasets
    facts.data = None if name == "datasets" else facts.data
    write_card(tmp_path, facts)
    assert TRACES[name] in (tmp_path / "README.md").read_text()
    empty = CardFacts("user/model", PoetXConfig())
    setattr(facts, name, getattr(empty, name))
    facts.loss_plot = None
    (tmp_path / "loss.png").unlink(missing_ok=True)
    write_card(tmp_path, facts)
    text = (tmp_path / "README.md").read_text()
    assert TRACES[name] not in text and "None" not in text and "nan" not in text


def test_an_empty_card_has_no_figure_but_the_settings(tmp_path: Path):
    write_card(tmp_path, CardFacts("model", PoetXConfig(block=64)))
    text = (tmp_path / "README.md").read_text()
    body = text.split("---\n", 2)[2]
    figures = re.findall(r"\d+(?:\.\d+)?", body.replace("sigma^4", "").replace("sigma^8", ""))
    config = PoetXConfig()
    settings = [64, config.permutation_group, config.merge_interval, config.base_error_bits, config.seed]
    assert figures == list(map(str, settings))
    assert "More Information Needed" not in text and not (tmp_path / "loss.png").exists()


def test_merge_facts_come_from_what_was_measured(tmp_path: Path):
    base = write_base(tiny_llama(), tmp_path / "base")
    ModelCard("---\nlicense: other\nlicense_name: llama3\n---\n# Base\n").save(tmp_path / "base/README.md")
    trainer = make_trainer(
        write_adapter(base, tmp_path / "start", merge_interval=2), tmp_path / "out", max_steps=5, save_strategy="steps",
        save_steps=5, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    summary = merge_checkpoint(tmp_path / "out/checkpoint-5", tmp_path / "merged")
    facts = CardFacts.of_export(summary, "user/merged")
    assert (facts.steps, facts.merges, facts.license, facts.license_name) == (5, 2, "other", "llama3")
    assert facts.merge_error == summary.largest_error == 0 and facts.dtype == "float32"
    assert facts.sigma == max(layer.sigma for layer in summary.adapter.figures())
    assert len([entry for entry in facts.log_history if "loss" in entry]) == 5
    live = CardFacts.of_model(trainer.model, "user/merged")
    assert (live.merges, live.sigma) == (facts.merges, pytest.approx(facts.sigma))
    live.add_trainer(trainer)
    assert live.training["learning_rate"] == 1e-2 and live.steps == 5
    write_card(tmp_path / "merged", facts)
    # The base model is a folder of this machine, which the Hub cannot link to.
    assert "base_model" not in header(tmp_path / "merged")
    assert str(tmp_path) not in (tmp_path / "merged/README.md").read_text()


def test_training_arguments_are_those_that_shape_the_result(tmp_path: Path):
    trainer = make_trainer(tiny_llama(), tmp_path, warmup_steps=3, save_steps=17, logging_steps=5)
    named = training_arguments(trainer.args)
    assert named["warmup_steps"] == 3 and named["max_steps"] == 8 and named["optim"]
    assert not {"save_steps", "logging_steps", "output_dir", "report_to", "hub_token", "push_to_hub"} & named.keys()
    assert str(tmp_path) not in str(named)


@pytest.mark.parametrize("scratch", [True, False])
def test_an_adapter_has_a_card_of_its_own(scratch: bool, tmp_path: Path):
    model = tiny_llama() if scratch else write_base(tiny_llama(), tmp_path / "base")
    write_adapter(model, tmp_path / "adapter", merges=2)
    text, metadata = (tmp_path / "adapter/README.md").read_text(), header(tmp_path / "adapter")
    # As PEFT has it in a folder, of a base model in a folder.
    assert metadata.get("base_model") == (None if scratch else str(tmp_path / "base"))
    assert metadata["library_name"] == "peft" and "poetx" in metadata["tags"]
    assert "absorbed by the weights: 2" in text and "import hf_poetx" in text
    assert "More Information Needed" not in text and "no base model on disk" not in text
    assert str(tmp_path) not in text.split("---\n", 2)[2]


def test_an_adapters_base_on_the_hub_is_named(tmp_path: Path):
    model = write_base(tiny_llama(), tmp_path / "base")
    model.config._name_or_path = model.name_or_path = "org/base"
    write_adapter(model, tmp_path / "adapter")
    assert header(tmp_path / "adapter")["base_model"] == "org/base"


def test_a_users_text_is_kept_and_the_section_renewed(tmp_path: Path):
    wrapped = write_adapter(tiny_llama(), tmp_path / "adapter")
    ModelCard("---\nlanguage: en\ntags:\n- mine\n---\n# Mine\n\nWords.\n").save(tmp_path / "adapter/README.md")
    wrapped.save_pretrained(tmp_path / "adapter")
    for layer in layers_of(wrapped):
        layer.poetx_merge_count["default"].fill_(7)
    complete_adapter_card(wrapped, tmp_path / "adapter", "adapter")
    text = (tmp_path / "adapter/README.md").read_text()
    assert "Words." in text and text.count("## Method") == 1 and "absorbed by the weights: 7" in text
    assert header(tmp_path / "adapter")["language"] == "en" and "mine" in header(tmp_path / "adapter")["tags"]


def test_cards_of_other_methods_stay_pefts(tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert "poetx" not in (tmp_path / "README.md").read_text().lower()


def test_the_template_in_the_package_is_the_one_shown(tmp_path: Path):
    assert (ROOT / "model_cards/template.md").read_text() == TEMPLATE.read_text()


def test_facts_of_a_live_export_are_asked_of_the_model(tmp_path: Path):
    write_adapter(tiny_llama(), tmp_path / "adapter")
    summary = merge_checkpoint(tmp_path / "adapter", tmp_path / "merged")
    assert CardFacts.of_adapter(AdapterFile.open(tmp_path / "adapter"), "a").base is None
    object.__setattr__(summary, "adapter", None)
    with pytest.raises(ValueError, match="of_model"):
        CardFacts.of_export(summary, "title")
