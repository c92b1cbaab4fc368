"""FlashOptim with accelerate without Trainer, with TRL, with distributed checkpoints, and with the Hub."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader

from hf_flashoptim import FlashAdamW, FlashLion, FlashSGD
from hf_flashoptim.gradient_release import unwrap
from tests.flashoptim.llama import single_thread, tiny_llama  # noqa: F401
from tests.flashoptim.models import assert_bit_equal, mixed_model, set_gradients, small_model, tensors_of, train
from tests.hub_client import HubClient


def accelerated(seed: int = 0):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = tiny_llama(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    tokens = torch.arange(24 * 8).view(24, 8) % 96
    loader = DataLoader(tokens, batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def run(accelerator, model, optimizer, loader, scheduler, steps):
    for index, tokens in enumerate(loader):
        if index not in steps:
            continue
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_accelerate_saves_and_loads_state_bit_for_bit(tmp_path):
    through = accelerated()
    run(*through, range(3))
    through[0].save_state(str(tmp_path))
    run(*through, range(3, 6))
    resumed = accelerated()
    resumed[0].load_state(str(tmp_path))
    run(*resumed, range(3, 6))
    assert isinstance(unwrap(resumed[2]), FlashAdamW)
    assert_bit_equal(
        tensors_of(through[1], unwrap(through[2])),
        tensors_of(resumed[1], unwrap(resumed[2])),
    )


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "fp32"])
@pytest.mark.parametrize(
    "cls, options", [(FlashAdamW, {}), (FlashLion, {}), (FlashSGD, {"momentum": 0.9})], ids=["adamw", "lion", "sgd"]
)
@pytest.mark.parametrize("bits", [24, 32])
def test_distributed_checkpoints_of_one_process_resume(cls, options, bits, compress, tmp_path):
    def make(seed):
        model = mixed_model(seed)
        return model, cls(model.parameters(), master_weight_bits=bits, compress_state_dict=compress, **options)

    model, optimizer = make(0)
    train(model, optimizer, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    fresh, other = make(0)
    fresh.load_state_dict(model.state_dict())
    template = get_optimizer_state_dict(fresh, other)
    dcp.load({"optimizer": template}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh, other, template)
    if compress:
        assert_bit_equal(tensors_of(model, optimizer), tensors_of(fresh, other))
    train(model, optimizer, range(3, 5))
    train(fresh, other, range(3, 5))
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0 if compress else 0.01, atol=0 if compress else 1e-4)


def test_a_reset_between_saving_and_loading_keeps_distributed_checkpoints_whole(tmp_path):
    """Popped state would be missing keys."""
    model = mixed_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(2))
    optimizer.reset_state([model[2].weight])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other = FlashAdamW(model.parameters())
    template = get_optimizer_state_dict(model, other)
    dcp.load({"optimizer": template}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, other, template)
    assert_bit_equal(tensors_of(model, optimizer), tensors_of(model, other))


def test_full_state_dicts_are_plain_and_load():
    model = mixed_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    other = FlashAdamW(model.parameters())
    set_optimizer_state_dict(model, other, full, options=options)
    assert_bit_equal(tensors_of(model, optimizer), tensors_of(model, other))


def test_asking_for_state_of_a_fresh_optimizer_moves_no_weight():
    """It takes a step with learning rate 0 and gradients 0."""
    model = mixed_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    get_optimizer_state_dict(model, FlashAdamW(model.parameters(), weight_decay=0.1))
    assert_bit_equal({name: p.detach() for name, p in model.named_parameters()}, before)


def test_trl_fine_tunes_with_it(tmp_path):
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), pad_token="<pad>", eos_token="<eos>")
    data = Dataset.from_dict({"text": ["one two three four five six seven eight"] * 16})
    args = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        optim="flash_adamw",
        optim_args="master_weight_bits=32",
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        bf16=False,
    )
    trainer = SFTTrainer(tiny_llama(torch.bfloat16), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1] < history[0] - 0.5
    assert unwrap(trainer.optimizer).state[trainer.model.lm_head.weight]["error_bits"].dtype == torch.int16


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = "one two three four five six seven eight".split()
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def push_from_trainer(folder: str, root: str) -> dict[str, Any]:
    """Runs in a client process of the Hub."""
    import sys

    sys.path.insert(0, root)
    import torch
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM

    from tests.flashoptim.llama import make_trainer

    trainer = make_trainer(folder, max_steps=2, hub_model_id="alice/flash", push_to_hub=True)
    trainer.train()
    trainer.push_to_hub()
    pulled = AutoModelForCausalLM.from_pretrained("alice/flash").state_dict()
    return {
        "equal": all(torch.equal(tensor, pulled[name]) for name, tensor in trainer.model.state_dict().items()),
        "card": ModelCard.load("alice/flash").content,
    }


def test_trainer_pushes_to_the_hub(run_client: HubClient, tmp_path: Path):
    seen = run_client(push_from_trainer, str(tmp_path / "out"), str(Path(__file__).parents[2]))
    assert seen["equal"] and "flash_adamw" in seen["card"].lower()


def test_gradients_from_a_scaler_are_stepped_after_unscaling():
    scaled, plain = small_model(), small_model()
    optimizers = [FlashAdamW(m.parameters()) for m in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        scaler.scale(torch.ones(()))
        for m in (scaled, plain):
            set_gradients(m, step)
        for p in scaled.parameters():
            p.grad.mul_(1024.0)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
    assert_bit_equal(tensors_of(scaled, optimizers[0]), tensors_of(plain, optimizers[1]))


def test_a_step_that_a_scaler_skips_changes_nothing():
    model = small_model()
    optimizer = FlashAdamW(model.parameters())
    train(model, optimizer, range(1))
    before = tensors_of(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    set_gradients(model, 1)
    model[2].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    assert_bit_equal(tensors_of(model, optimizer), before)
