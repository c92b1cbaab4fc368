"""Tiny random models of many families, and what the tests of the tuner do with them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_poetx import PoetXConfig, get_poetx_model
from hf_poetx.checkpoint import poetx_layers

VOCABULARY = 64
# Divides none of the widths below (24, 40, 12, ...), so that every side ends in a smaller block.
BLOCK = 7

_COMMON = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24}
_LLAMA = _COMMON | {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
_LLAMA_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_NEOX_PROJECTIONS = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
_DEEPSEEK = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip

# Family: model class, configuration class, its arguments, last parts of the names of all linear layers but the head.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, _LLAMA_PROJECTIONS),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA, _LLAMA_PROJECTIONS),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA | {"tie_word_embeddings": True}, _LLAMA_PROJECTIONS),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 8}, _LLAMA_PROJECTIONS),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _LLAMA | {"head_dim": 8}, _LLAMA_PROJECTIONS),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _LLAMA | {"head_dim": 8}, _LLAMA_PROJECTIONS),
    "Phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        _LLAMA | {"pad_token_id": 0},
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "n_embd": 24, "n_positions": 64},
        {"c_attn", "c_proj", "c_fc"},
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _COMMON | {"intermediate_size": 40}, _NEOX_PROJECTIONS),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        _COMMON | {"ffn_dim": 40, "word_embed_proj_dim": 20, "max_position_embeddings": 64},
        {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"},
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4, "hidden_size": 24},
        _NEOX_PROJECTIONS,
    ),
    "Falcon": ("FalconForCausalLM", "FalconConfig", _COMMON | {"bias": True}, _NEOX_PROJECTIONS),
    "StarCoder2": (
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        _LLAMA,
        {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"},
    ),
    "OLMo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA, _LLAMA_PROJECTIONS),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA | {"num_local_experts": 4},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "Qwen3MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "DeepSeekV3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _COMMON | {"intermediate_size": 40} | _DEEPSEEK,
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
}
MIXTURES = ("Mixtral", "Qwen3MoE", "DeepSeekV3")


def family_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> nn.Module:
    """A model of a family in evaluation mode, the same for the same seed; its biases and norms are no special values."""
    model_cls, config_cls, arguments, _ = FAMILIES[family]
    config = getattr(transformers, config_cls)(**arguments | settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_cls)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Not the tiny values that models start from: outputs should be of the size of one.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    """Random token ids, the same at every call."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, **inputs: Any) -> Tensor:
    """Outputs for `tokens()` in evaluation mode."""
    model.eval()
    return model(**{"input_ids": tokens()} | inputs).logits


@torch.no_grad()
def randomize_skew(model: nn.Module, sigma: float = 0.2, seed: int = 5, adapter_name: str | None = None) -> nn.Module:
    """Give the rotations of a model, or of one adapter, skew matrices of about this largest singular value."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in poetx_layers(model):
        for name in layer.poetx_config if adapter_name is None else [adapter_name]:
            for parameter in layer.skew_parameters(name):
                block = (1 + (1 + 8 * parameter.shape[1]) ** 0.5) / 2
                values = torch.randn(parameter.shape, generator=generator) * sigma / (2 * block**0.5)
                parameter.copy_(values)
    return model


def poetx_family(family: str = "Llama", adapter_name: str = "default", **settings: Any) -> nn.Module:
    """A tiny model of a family under a fresh adapter that never merges, unless `settings` of the config say otherwise."""
    config = PoetXConfig(**{"block": BLOCK, "merge_interval": 0} | settings)
    return get_poetx_model(family_model(family), config, adapter_name)


def trained_poetx(family: str = "Llama", **settings: Any) -> nn.Module:
    """Like `poetx_family`, with rotations that are not the identity."""
    return randomize_skew(poetx_family(family, **settings))


def save_to(base: nn.Module, folder: Any) -> str:
    """Save a base model to disk and return its path, which adapters made on it afterwards name as their base."""
    base.save_pretrained(folder)
    return str(folder)


def tensors_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two state dicts are the same, bit for bit, in names, dtypes and values."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(_bytes(left[name]), _bytes(right[name])) for name in left
    )


def _bytes(tensor: Tensor) -> Tensor:
    # NaN is no equal of itself, but its bits are.
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def copies(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict that later changes of the model leave alone."""
    return {name: tensor.detach().clone() for name, tensor in state_dict.items()}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Checks that a block of code leaves every tensor of a model as it was."""
    before = copies(model.state_dict())
    yield
    assert tensors_equal(before, model.state_dict())


def messages(recorded: list[Any], about: str) -> list[str]:
    """Texts of recorded warnings that contain a word."""
    return [str(warning.message) for warning in recorded if about in str(warning.message)]


def train_step(model: nn.Module, lr: float = 0.1, loss: Callable[[Tensor], Tensor] | None = None) -> None:
    """One step of plain gradient descent over everything that is trainable."""
    model.train()
    inputs = tokens()
    output = model(input_ids=inputs, labels=inputs)
    (output.loss if loss is None else loss(output.logits)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=lr)
                parameter.grad = None
    model.eval()
