"""Peak memory of one training step of a Llama-like model, from counting what is kept.

Two moments compete. When the backward pass begins, all activations and the temporaries of the loss are there, but no
gradients; when the optimizer steps, all gradients are there, but no activations. In between one falls as the other
rises, layer by layer, so the peak is at one of the two.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers.pytorch_utils import Conv1D

from .ops.fold import folding_pays
from .ops.skew import num_entries
from .rotation import split_width
from .skeleton import skeleton_of

METHODS = ("poetx", "lora", "full")
GPU_SIZES = (24, 48, 80, 141)
# What the driver, CUDA's libraries and the allocator's gaps take of a GPU, in bytes.
OVERHEAD = 2**30


class StateSize(NamedTuple):
    """Bytes that an optimizer keeps for each parameter, by the parameter's dtype."""

    of_bf16: float
    of_fp32: float


# Compressed moments are 1 byte and a bf16 scale for 32 of them; a bf16 parameter has 8 error bits more.
_MOMENT = 1 + 2 / 32
OPTIMIZERS = {
    "flash_adamw": StateSize(2 * _MOMENT + 1, 2 * _MOMENT),
    "flash_lion": StateSize(_MOMENT + 1, _MOMENT),
    "flash_sgdw": StateSize(_MOMENT + 1, _MOMENT),
    "adamw": StateSize(4, 8),
    "adamw_8bit": StateSize(2 + 8 / 256, 2 + 8 / 256),
    "adamw_fp32": StateSize(inf, 8),
    "sgd": StateSize(0, 0),
}

# Hidden size, MLP size, layers, heads, key/value heads, head size, vocabulary, tied embeddings.
_LLAMAS = {
    "1B": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "7B": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "13B": (5120, 13824, 40, 40, 40, 128, 32000, False),
    "70B": (8192, 28672, 80, 64, 8, 128, 128256, False),
}


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its memory.

    `linears` are ``(in_features, out_features)`` of all linear layers but the head; `rest` is the number of all other
    parameters.
    """

    linears: list[tuple[int, int]]
    rest: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_width: int
    vocabulary: int

    @property
    def wrapped(self) -> int:
        """Number of weights in `linears`."""
        return sum(inside * outside for inside, outside in self.linears)


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        method: "poetx", "lora" (adapters on all linear layers) or "full".
        block: of POET-X.
        rank: of LoRA.
        bf16_adapters: of LoRA; PEFT's default is fp32.
        batch: sequences in a forward pass.
        sequence: tokens of each.
        optimizer: one of `OPTIMIZERS`; "adamw_fp32" keeps the weights in fp32 and computes under autocast.
        memory_mode: of POET-X.
        train_rest: embeddings, norms and head are trained too.
        checkpointing: activations are recomputed layer by layer.
        gradient_release: each gradient is used and freed in the backward pass.
        accumulation: forward passes for a step; with more than one, gradients are there when the backward pass begins.
        error_bits: 8 more bits of every base weight.
    """

    method: str = "poetx"
    block: int = 256
    rank: int = 64
    bf16_adapters: bool = False
    batch: int = 1
    sequence: int = 1024
    optimizer: str = "flash_adamw"
    memory_mode: str = "fast"
    train_rest: bool = False
    checkpointing: bool = False
    gradient_release: bool = False
    accumulation: int = 1
    error_bits: bool = False

    def __post_init__(self) -> None:
        for name in ("block", "rank", "batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use a number >= 1")
        if self.method not in METHODS or self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"method={self.method!r}, optimizer={self.optimizer!r}: use one of {', '.join(METHODS)} and one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        if self.optimizer == "adamw_fp32" and self.method != "full":
            raise ValueError("optimizer='adamw_fp32' means fp32 weights under autocast; use it with method='full'")
        if self.gradient_release and self.accumulation > 1:
            raise ValueError(f"gradient_release=True steps in every backward pass; accumulation={self.accumulation}")

    @property
    def tokens(self) -> int:
        """Of a forward pass."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Estimate:
    """Bytes by part at the two moments that compete for the peak."""

    backward: dict[str, float]
    step: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes at the larger of the two moments."""
        return max(sum(self.backward.values()), sum(self.step.values()))

    def fits(self, gigabytes: float) -> bool:
        """Whether the step runs on a GPU of that size, beside `OVERHEAD`. GPUs are sold in units of 2^30 bytes."""
        return self.peak + OVERHEAD <= gigabytes * 2**30

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        fits = {str(size): self.fits(size) for size in GPU_SIZES}
        return {"backward": self.backward, "step": self.step, "peak": self.peak, "fits": fits}


def model_shape(model: str | Path) -> ModelShape:
    """The shape of a model in a folder or repository with a ``config.json``, or of a Llama by its size, such as "8B".

    Raises:
        ValueError: for a mixture of experts, whose activations depend on the routing, or a model that is not Llama-like.
        OSError: if there is no such model.
    """
    size = str(model).upper()
    config = _llama(*_LLAMAS[size]) if size in _LLAMAS else AutoConfig.from_pretrained(model)
    config = config.get_text_config()
    missing = [name for name in ("intermediate_size", "num_key_value_heads") if not hasattr(config, name)]
    if missing or getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        raise ValueError(
            f"{model} ({config.model_type}) is a mixture of experts or not like a Llama; the activations that the "
            "estimate counts are those of a Llama's layers"
        )
    skeleton = skeleton_of(config, "AutoModelForCausalLM")
    head = skeleton.get_output_embeddings()
    linears = [
        (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        for module in skeleton.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        linears=linears,
        rest=total - sum(inside * outside for inside, outside in linears),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        key_value_width=config.num_key_value_heads * head_width,
        vocabulary=config.vocab_size,
    )


def _llama(hidden, intermediate, layers, heads, kv_heads, head, vocabulary, tied) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def skew_entries(width: int, block: int) -> int:
    """Trained entries of one side of a layer: ``b (b - 1) / 2`` for each block, and for the smaller last one.

    Example:
        >>> skew_entries(576, 256) == 2 * 256 * 255 // 2 + 64 * 63 // 2
        True
    """
    block, full, rest = split_width(width, block)
    return full * num_entries(block) + num_entries(rest)


def estimate(shape: ModelShape, training: Training) -> Estimate:
    """Count bytes, by part, when the backward pass begins and when the optimizer steps.

    It counts tensors, as ``torch.cuda.max_memory_allocated`` does, of a model in bf16 with fused attention
    (`scaled_dot_product_attention`) and the loss of transformers, which holds the logits of all tokens.
    """
    state, fp32_weights = OPTIMIZERS[training.optimizer], training.optimizer == "adamw_fp32"
    size = 4 if fp32_weights else 2
    parts = {"weights": (shape.wrapped + shape.rest) * size}
    if training.error_bits:
        parts["error bits"] = shape.wrapped
    # Parameters of each kind that are trained: adapters, in fp32 as a rule, and what belongs to the base model.
    adapters, base = _trained(shape, training)
    adapter_size = 2 if training.method == "lora" and training.bf16_adapters else 4
    if adapters:
        name = {"poetx": "skew entries and permutations", "lora": "adapters"}[training.method]
        permutations = sum(map(sum, shape.linears)) if training.method == "poetx" else 0
        parts[name] = adapters * adapter_size + permutations * 4
    parts["optimizer states"] = adapters * (state.of_fp32 if adapter_size == 4 else state.of_bf16)
    parts["optimizer states"] += base * (state.of_fp32 if fp32_weights else state.of_bf16) if base else 0
    gradients = 0 if training.gradient_release else adapters * adapter_size + base * size
    backward = parts | {"activations": _activations(shape, training), "loss": _loss(shape, training)}
    if training.accumulation > 1:
        backward["gradients"] = gradients
    return Estimate(backward, parts | {"gradients": gradients})


def _trained(shape: ModelShape, training: Training) -> tuple[int, int]:
    if training.method == "full":
        return 0, shape.wrapped + shape.rest
    if training.method == "lora":
        adapters = sum(training.rank * (inside + outside) for inside, outside in shape.linears)
    else:
        adapters = sum(skew_entries(width, training.block) for sides in shape.linears for width in sides)
    return adapters, shape.rest if training.train_rest else 0


def layer_activations(shape: ModelShape, training: Training) -> int:
    """Bytes that one layer keeps for its backward pass.

    A norm keeps its input and root mean square in fp32 and, if its weight is trained, what that is multiplied with.
    Attention keeps its queries, keys, values, output and a logarithm in fp32 for each head. The MLP keeps the gate, its
    activation, and the other factor. Linear layers keep their inputs, which are shared within q/k/v and within gate/up;
    POET-X's fast mode keeps the product with the weight as well, or the folded weight where that is faster, LoRA the
    product with its first matrix; with fp32 adapters each of LoRA's layers keeps its own input in fp32 in the place of
    the shared one.
    """
    hidden, intermediate, narrow = shape.hidden, shape.intermediate, shape.key_value_width
    trains_norms = training.method == "full" or training.train_rest
    norms = 2 * ((4 + 2 * trains_norms) * hidden + 4)
    attention = 2 * (hidden + 2 * narrow + hidden) + 4 * shape.heads
    mlp = 2 * 3 * intermediate
    inputs = 2 * (hidden + hidden + intermediate)
    products = extra = 0
    if training.method == "poetx" and training.memory_mode == "fast":
        linears = [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden)]
        linears += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        for inside, outside in linears:
            folds = folding_pays(training.tokens, inside, outside, training.block, "cuda")
            products += 2 * outside * (inside if folds else training.tokens)
    elif training.method == "lora":
        size = 2 if training.bf16_adapters else 4
        extra = size * 7 * training.rank
        if not training.bf16_adapters:
            inputs = 4 * (6 * hidden + intermediate)
    return (norms + attention + mlp + inputs + extra) * training.tokens + products


def _activations(shape: ModelShape, training: Training) -> int:
    layer = layer_activations(shape, training)
    if training.checkpointing:
        # Every layer's input, and one layer that is computed again; while the loss is there, none is.
        inputs = shape.layers * 2 * shape.hidden * training.tokens
        return inputs + max(0, layer - _loss(shape, training))
    return shape.layers * layer


def _loss(shape: ModelShape, training: Training) -> int:
    """Logits in bf16; in fp32 their log-softmax, its gradient, and the logits' gradient."""
    return (2 + 4 + 4 + 4) * shape.vocabulary * training.tokens


def draw(result: Estimate, file: str | Path, title: str) -> None:
    """Draw the two moments as stacked bars, with GPU sizes as lines, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    names = list(result.backward | result.step)
    moments = {"optimizer steps": result.step, "backward begins": result.backward}
    left = dict.fromkeys(moments, 0.0)
    for name in names:
        sizes = [moment.get(name, 0) / 2**30 for moment in moments.values()]
        axes.barh(list(moments), sizes, left=list(left.values()), label=name)
        left = {moment: left[moment] + size for moment, size in zip(left, sizes, strict=True)}
    for size in GPU_SIZES:
        if size < 1.5 * result.peak / 2**30:
            axes.axvline(size, color="black", linestyle=":", linewidth=1)
            axes.text(size, 1.5, f" {size} GB", va="top", fontsize=8)
    axes.set(xlabel="GiB", title=title)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120)
