"""`TrainingArguments(torch_compile=True)` with POET-X: one graph through all merges, and training as without it.

The backend runs the operations of the traced graph as they are: in fp32 results are the same bit for bit. In bf16 the
compiler computes some chains of them in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import hf_flashoptim  # noqa: F401  registers flash_adamw
from tests.poetx_training import assert_same_state, losses, make_trainer, merge_counts, tiny_poetx
from tests.versions import needs

pytestmark = needs("torch", "2.8", "transformers' plain model is not one graph either")
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def compiler():
    """The compiler in its first state; only what a test allows may be compiled anew."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, folder: Path, resume: str | None = None, **arguments: Any) -> Trainer:
    trainer = make_trainer(model, folder, **{"optim": "flash_adamw"} | arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(("mode", "train_rest"), [("fast", True), ("mem", False)], ids=["fast-all", "mem-adapters"])
def test_one_graph_trains_like_eager_through_all_merges(tmp_path, mode, train_rest):
    eager, compiled = (tiny_poetx(train_rest=train_rest, memory_mode=mode) for _ in range(2))
    expected = losses(trained(eager, tmp_path))
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer = trained(compiled, tmp_path, **COMPILED)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert merge_counts(compiled) == {4} and losses(trainer) == expected
    assert_same_state(eager, compiled)


def test_one_graph_trains_like_eager_in_bf16(tmp_path):
    eager, compiled = (tiny_poetx(torch.bfloat16) for _ in range(2))
    expected = losses(trained(eager, tmp_path))
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer = trained(compiled, tmp_path, **COMPILED)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    # A rounding step of the logits, of which the loss averages many.
    assert merge_counts(compiled) == {4} and losses(trainer) == pytest.approx(expected, rel=2.0**-9)


def test_accumulated_gradients_take_the_same_graph(tmp_path):
    eager, compiled = tiny_poetx(), tiny_poetx()
    arguments = {"gradient_accumulation_steps": 2, "max_steps": 5}
    expected = losses(trained(eager, tmp_path, **arguments))
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer = trained(compiled, tmp_path, **arguments, **COMPILED)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert merge_counts(compiled) == {2} and losses(trainer) == expected


class Graphs(TrainerCallback):
    """How many there were after each step."""

    def __init__(self) -> None:
        self.count: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.count.append(counters["stats"]["unique_graphs"])


def test_checkpointed_activations_need_no_new_graph_after_the_first_step(tmp_path):
    """There are several: transformers marks the embeddings' output as requiring gradients, which breaks the graph."""
    graphs, eager, compiled = Graphs(), tiny_poetx(), tiny_poetx()
    expected = losses(trained(eager, tmp_path, gradient_checkpointing=True))
    trainer = trained(compiled, tmp_path, gradient_checkpointing=True, callbacks=[graphs], **COMPILED)
    assert len(graphs.count) == 8 and set(graphs.count) == {graphs.count[0]} and merge_counts(compiled) == {4}
    assert losses(trainer) == expected
    assert_same_state(eager, compiled)


def test_evaluation_between_the_steps_sees_every_merge(tmp_path):
    eager, compiled = tiny_poetx(), tiny_poetx()
    found = []
    for model, arguments in ((eager, {}), (compiled, COMPILED)):
        trainer = trained(model, tmp_path, eval_strategy="steps", eval_steps=1, **arguments)
        found.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
    assert found[0] == found[1] and len(found[0]) == 8
    # That of training, and one of evaluation where the Trainer compiles it.
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
    assert_same_state(eager, compiled)


def test_compiled_training_resumes_from_its_checkpoint_bit_for_bit(tmp_path):
    whole, resumed = tiny_poetx(), tiny_poetx()
    saving = {"save_strategy": "steps", "save_steps": 3}
    expected = losses(trained(whole, tmp_path, **saving, **COMPILED))
    trainer = trained(resumed, tmp_path / "again", str(tmp_path / "checkpoint-3"), **COMPILED)
    assert losses(trainer) == expected
    assert_same_state(whole, resumed)


def test_merged_checkpoint_of_a_compiled_model_is_eagers(tmp_path):
    merged = []
    for name, arguments in (("eager", {}), ("compiled", COMPILED)):
        trainer = trained(tiny_poetx(), tmp_path, **arguments)
        trainer.model.merge_and_unload().save_pretrained(tmp_path / name)
        merged.append(AutoModelForCausalLM.from_pretrained(tmp_path / name))
    assert_same_state(*merged)
