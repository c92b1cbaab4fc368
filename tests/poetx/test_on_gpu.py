"""What only a GPU can show of training and running wrapped models; without one the file is skipped.

`POETX_TEST_DEVICE=cpu` runs on the CPU all but what needs CUDA itself, to check the tests and not the code.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_flashoptim
from hf_poetx import PoetXCallback, PoetXConfig, create_poetx_optimizer, get_poetx_model, merge_step
from hf_poetx import merge_then_reinitialize as merge_now
from hf_poetx.block_cache import BlockCache
from hf_poetx.checkpoint import poetx_layers
from hf_poetx.ops.rotation import Rotation
from hf_poetx.optimizer import trainable_skew
from tests.poetx.helpers import family_model, randomize_skew, tokens, trained_poetx
from tests.poetx_training import layers_of, losses, make_trainer, merge_counts, tiny_poetx

DEVICE = os.environ.get("POETX_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a GPU")
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="is about CUDA")


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Outputs for `tokens()` in evaluation mode."""
    return model.eval()(input_ids=tokens().to(DEVICE)).logits


def loss_of(model: nn.Module) -> Tensor:
    inputs = tokens().to(DEVICE)
    return model(input_ids=inputs, labels=inputs).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


class Overflow(TrainerCallback):
    """Scales the loss of one step so much that its gradients overflow fp16, and notes which steps were skipped."""

    def __init__(self, step: int) -> None:
        self.step, self.skipped, self.trainer = step, [], None

    def on_step_begin(self, args, state, control, **kwargs):
        scaler = self.trainer.accelerator.scaler
        scale = 2.0**60 if state.global_step == self.step else 2.0**10
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.skipped.append(state.global_step)


@needs_cuda
@pytest.mark.parametrize("base", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("optim", ["adamw_torch", "flash_adamw"])
def test_gradient_scaler_that_skips_a_merge_step_leaves_clock_and_dtypes_alone(tmp_path, optim, base):
    # A scaler cannot unscale gradients of fp16, so of an fp16 model the adapters alone are trained.
    model = tiny_poetx(base, merge_interval=3, poet_scale=0.1, train_rest=base == torch.float32)
    overflow = Overflow(step=5)
    trainer = make_trainer(
        model,
        tmp_path,
        callbacks=[overflow],
        optim=optim,
        fp16=True,
        use_cpu=not ON_GPU,
        max_steps=12,
        learning_rate=1e-2 if base == torch.float32 else 3e-2,
    )
    overflow.trainer = trainer
    trainer.train()
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, PoetXCallback))
    assert overflow.skipped == [6], "the sixth step, after which a merge is due, overflows"
    assert list(callback.reports) == [3, 6, 9, 12] and merge_counts(model) == {4}
    assert callback.reports[6].max_sigma > 0, "two of its three steps were taken"
    logged = losses(trainer)
    assert all(torch.isfinite(torch.tensor(loss)) for loss in logged.values())
    # The rows of an epoch are the same in all: the last epoch of four steps against the first.
    assert sum(logged[step] for step in range(9, 13)) < sum(logged[step] for step in range(1, 5))
    assert {p.dtype for p in trainable_skew(model)} == {torch.float32}
    assert {layer.get_base_layer().weight.dtype for layer in layers_of(model)} == {base}


def write_base(folder: Path) -> None:
    family_model("Llama").save_pretrained(folder / "base")


def dispatched(folder: Path, merge_interval: int = 0) -> nn.Module:
    """An adapter on a model whose second layer is offloaded, by `device_map`."""
    here = "cuda:0" if ON_GPU else "cpu"
    # Where products run on the CPU, weights can be offloaded to the disk alone.
    device_map = {"model.embed_tokens": here, "model.layers.0": here, "model.layers.1": "cpu" if ON_GPU else "disk"}
    device_map |= {"model.norm": here, "model.rotary_emb": here, "lm_head": here}
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", device_map=device_map, offload_folder=folder / "offload"
    )
    model = randomize_skew(get_poetx_model(base, PoetXConfig(block=7, merge_interval=merge_interval)))
    offloaded = [layer.get_base_layer().weight.is_meta for layer in layers_of(model)]
    assert offloaded == [False] * 7 + [True] * 7
    assert {p.device.type for p in trainable_skew(model)} == {DEVICE}
    return model


def whole(folder: Path) -> nn.Module:
    base = AutoModelForCausalLM.from_pretrained(folder / "base").to(DEVICE)
    return randomize_skew(get_poetx_model(base, PoetXConfig(block=7, merge_interval=0)))


# A hundred roundings of fp32 in sequence, each twice as large in products of three TF32 ones.
FP32 = 100 * 2.0**-23


def test_offloaded_layers_run_and_train_like_those_on_the_device(tmp_path):
    write_base(tmp_path)
    model, expected = dispatched(tmp_path), whole(tmp_path)
    assert relative(logits(model), logits(expected)) <= FP32
    for each in (model, expected):
        each.train()
        optimizer = create_poetx_optimizer(each, torch.optim.SGD, 0.5)
        loss_of(each).backward()
        each.kept = gradients(each)
        optimizer.step()
    assert model.kept.keys() == expected.kept.keys()
    for name, gradient in expected.kept.items():
        assert gradient.any() and relative(model.kept[name], gradient) <= 10 * FP32, name
    assert relative(logits(model), logits(expected)) <= FP32
    assert not torch.equal(logits(model), logits(whole(tmp_path)))


def test_offloaded_layers_take_no_periodic_merge(tmp_path):
    write_base(tmp_path)
    model = dispatched(tmp_path, merge_interval=2)
    before = logits(model)
    with pytest.raises(ValueError, match=r"offloaded.*merge_interval=0"):
        merge_now(model)
    optimizer = create_poetx_optimizer(model, torch.optim.SGD, 0.0)
    loss_of(model.train()).backward()
    optimizer.step()
    merge_step(model, optimizer)
    with pytest.raises(ValueError, match=r"offloaded.*merge_interval=0"):
        merge_step(model, optimizer)
    assert merge_counts(model) == {0} and torch.equal(logits(model), before), "nothing was merged by halves"


def test_offloaded_layers_merge_unmerge_and_unload(tmp_path):
    write_base(tmp_path)
    model = dispatched(tmp_path)
    before = logits(model)
    model.merge_adapter()
    assert relative(logits(model), before) <= FP32
    model.unmerge_adapter()
    assert torch.equal(logits(model), before)
    merged = model.merge_and_unload()
    assert not any(True for _ in poetx_layers(merged))
    assert relative(logits(merged), before) <= FP32
    assert sum(p.is_meta for p in merged.parameters()) > 0, "what was offloaded still is"


def cached_model() -> nn.Module:
    return trained_poetx().to(DEVICE).eval()


def kept(model: nn.Module) -> int:
    return sum(len(layer._block_cache._kept) for _, layer in poetx_layers(model))


def rotations_of(model: nn.Module) -> int:
    return 2 * sum(1 for _ in poetx_layers(model))


def without_cache(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The same outputs from blocks that are built for them."""
    with monkeypatch.context() as patch:
        patch.setattr(BlockCache, "_blocks", lambda self, key, rotation, dtype: rotation.blocks(dtype))
        return logits(model)


def test_generation_is_the_same_with_kept_blocks_which_are_built_once(monkeypatch):
    model, inputs = cached_model(), tokens().to(DEVICE)
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    built = []
    original = Rotation.blocks
    monkeypatch.setattr(Rotation, "blocks", lambda self, dtype: built.append(self) or original(self, dtype))
    generated = model.generate(input_ids=inputs, **arguments)
    assert len(built) == rotations_of(model)
    monkeypatch.setattr(BlockCache, "_blocks", lambda self, key, rotation, dtype: rotation.blocks(dtype))
    assert torch.equal(model.generate(input_ids=inputs, **arguments), generated)
    assert len(built) == 9 * rotations_of(model)


def in_place(model: nn.Module) -> None:
    randomize_skew(model, seed=9)


def new_data(model: nn.Module) -> None:
    for parameter in trainable_skew(model):
        parameter.data = -parameter.data


def new_state(model: nn.Module, assign: bool = False) -> None:
    other = randomize_skew(trained_poetx(), seed=9).to(DEVICE)
    model.load_state_dict(other.state_dict(), assign=assign)


def stepped(make_optimizer: type[torch.optim.Optimizer], **options) -> object:
    def change(model: nn.Module) -> None:
        optimizer = make_optimizer(trainable_skew(model), lr=0.1, **options)
        loss_of(model).backward()
        # Kept again after that pass: it is the step itself that must be seen.
        logits(model)
        assert kept(model) == rotations_of(model)
        optimizer.step()

    return change


CHANGES = {
    "in place": in_place,
    "data": new_data,
    "load_state_dict": new_state,
    "load_state_dict, assigned": lambda model: new_state(model, assign=True),
    "SGD": stepped(torch.optim.SGD, foreach=True),
    "AdamW": stepped(torch.optim.AdamW, fused=True),
    "FlashAdamW": stepped(hf_flashoptim.FlashAdamW),
    "merge": merge_now,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_entries_between_evaluations_is_seen(monkeypatch, change):
    model = cached_model()
    before = logits(model)
    CHANGES[change](model)
    after = logits(model)
    assert torch.equal(after, without_cache(model, monkeypatch)) and not torch.equal(after, before)


@pytest.mark.parametrize("clear", ["train", "forward"])
def test_a_write_through_data_is_seen_after_the_next_training(monkeypatch, clear):
    model = cached_model()
    before = logits(model)
    for parameter in trainable_skew(model):
        parameter.data.neg_()
    if clear == "train":
        model.train()
    else:
        loss_of(model)
    after = logits(model)
    assert torch.equal(after, without_cache(model, monkeypatch)) and not torch.equal(after, before)


def test_inference_mode_keeps_blocks_of_ordinary_entries_and_none_of_inference_tensors(monkeypatch):
    model = cached_model()
    expected = logits(model)
    model.train().eval()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(input_ids=tokens().to(DEVICE)).logits, expected)
        assert kept(model) == rotations_of(model)
        # Their version cannot be asked for.
        untracked = cached_model()
        for _, layer in poetx_layers(untracked):
            for container in (getattr(layer, name) for name in layer.adapter_layer_names):
                for name, parameter in list(container.items()):
                    container[name] = nn.Parameter(parameter.clone(), requires_grad=False)
            assert all(p.is_inference() for p in layer.skew_parameters("default"))
        # Without kept blocks other kernels run.
        assert relative(untracked(input_ids=tokens().to(DEVICE)).logits, expected) <= FP32
        assert kept(untracked) == (0 if ON_GPU else rotations_of(untracked))


@needs_cuda
@torch.no_grad()
def test_a_captured_graph_keeps_nothing_and_replays_with_later_entries():
    model = cached_model()
    layer = next(layer for _, layer in poetx_layers(model))
    x = torch.randn(3, layer.in_features, device=DEVICE)
    # Kernels are compiled, and blocks kept, outside of the capture.
    layer(x)
    with torch.cuda.stream(torch.cuda.Stream()), torch.enable_grad():
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(x)
    assert kept(model) == 0
    for seed in (9, 10):
        randomize_skew(model, seed=seed)
        graph.replay()
        replayed = output.clone()
        assert relative(replayed, layer(x)) <= FP32


@needs_cuda
def test_training_frees_the_memory_of_kept_blocks():
    model = cached_model()
    logits(model)
    model.train()
    before = torch.cuda.memory_allocated()
    logits(model)
    assert torch.cuda.memory_allocated() > before
    model.train()
    assert torch.cuda.memory_allocated() == before


@pytest.fixture
def compiler(monkeypatch):
    """The compiler in its first state, and no word of it in the environment for what runs later."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@needs_cuda
@pytest.mark.parametrize("tf32", [True, False])
def test_trainer_may_set_tf32_either_way(tmp_path, tf32, monkeypatch):
    """As it does by itself for torch_compile=True; PyTorch's older switch raises from then on."""
    if hasattr(torch.backends, "fp32_precision"):
        monkeypatch.setattr(torch.backends, "fp32_precision", torch.backends.fp32_precision)
    model = tiny_poetx(merge_interval=2)
    trainer = make_trainer(model, tmp_path, use_cpu=False, tf32=tf32, max_steps=4)
    trainer.train()
    assert merge_counts(model) == {2} and all(loss < 5 for loss in losses(trainer).values())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_trainer_takes_one_graph_through_all_merges_and_trains_like_eager(tmp_path, compiler, mode):
    found = []
    for compiled in (False, True):
        model = tiny_poetx(merge_interval=2, poet_scale=0.1)
        arguments = {"torch_compile": True, "torch_compile_mode": mode} if compiled else {}
        # Far above what rounding makes of a gradient of zero, to which Adam would give the step of any other.
        arguments["adam_epsilon"] = 1e-4
        # Else TrainingArguments would switch TF32 on for compiled training alone.
        arguments |= {"optim": "flash_adamw", "use_cpu": not ON_GPU, "tf32": False}
        trainer = make_trainer(model, tmp_path, **arguments)
        with torch._dynamo.config.patch(error_on_recompile=True):
            trainer.train()
        assert merge_counts(model) == {4}
        trainer.model.merge_and_unload().save_pretrained(tmp_path / f"merged{compiled}")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged{compiled}")
        found.append((losses(trainer), torch.cat([p.detach().flatten() for p in merged.parameters()])))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not ON_GPU or mode == "default" or not counters["inductor"]["cudagraph_skips"]
    (eager, eager_weights), (compiled, compiled_weights) = found
    assert compiled == pytest.approx(eager, rel=FP32)
    assert relative(compiled_weights, eager_weights) <= 100 * FP32


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("mode", ["fast", "mem"])
def test_checkpointed_activations_give_the_same_gradients_under_autocast(mode, use_reentrant):
    def step(checkpointed: bool) -> dict[str, Tensor]:
        # Attention of one implementation, whose backward pass adds in one order.
        base = family_model("Llama", attn_implementation="eager").to(DEVICE)
        config = PoetXConfig(block=8, merge_interval=0, memory_mode=mode)
        model = randomize_skew(get_poetx_model(base, config)).train()
        if checkpointed:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        return gradients(model)

    plain, again, recomputed = step(False), step(False), step(True)
    assert plain.keys() == recomputed.keys() and all(gradient.any() for gradient in plain.values())
    assert {gradient.dtype for gradient in plain.values()} == {torch.float32}
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), f"{name} differs between two runs of the same"
        assert torch.equal(recomputed[name], gradient), name
