"""Configuration of a POET-X adapter."""

import difflib
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from peft import PeftConfig, PeftType

from .enum_member import add_str_enum_member

# PEFT has no plug-in API: its enumeration has to know the method before a config of it can exist.
POETX = add_str_enum_member(PeftType, "POETX", "POETX")

# Stands for the path of a base model that exists on no disk; whatever tries to load it shows this text.
NO_BASE_ON_DISK = (
    "no base model on disk: build it from the base_config in adapter_config.json and use PeftModel.from_pretrained"
)


def _names_closest_field(config_cls: type) -> type:
    """Let an unknown keyword of a dataclass name the field that was probably meant; the signature stays as it is."""
    original = config_cls.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        names = [f.name for f in fields(config_cls)]
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(sorted(names))}"
                # PEFT looks for these words when it loads a file that a newer version wrote, and goes on without it.
                raise TypeError(f"{config_cls.__name__} got an unexpected keyword argument {name!r}; {hint}")
        original(self, *args, **kwargs)

    config_cls.__init__ = __init__
    return config_cls


@_names_closest_field
@dataclass
class PoetXConfig(PeftConfig):
    """Configuration of POET-X: frozen weights between trained block-diagonal orthogonal transforms.

    The fields describe themselves: ``{f.name: f.metadata["help"] for f in dataclasses.fields(PoetXConfig)}``.

    Raises:
        TypeError: for an unknown field, naming the closest one.
        ValueError: for a value out of range, naming the field, the value and what is allowed.

    Example:
        >>> PoetXConfig(block=1)
        Traceback (most recent call last):
        ...
        ValueError: block=1: a rotation needs at least 2 columns; use an integer >= 2, such as 256
    """

    block: int = field(
        default=256, metadata={"help": "Size of the orthogonal blocks. Any width works: the last block is smaller."}
    )
    target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Names or regular expression of the layers to wrap. Default: all linear layers but the head."
        },
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names or regular expression of layers to leave alone."}
    )
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Indices of the layers to wrap; needs target_modules as a list."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name of the list of layers that layers_to_transform counts in."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules to copy, train and save beside the adapter. See also train_rest."}
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Tokens whose embeddings are trained, by embedding module; all if train_rest."}
    )
    merge_interval: int = field(
        default=200,
        metadata={"help": "Optimizer steps between merges of the transforms into the weights; 0 never merges."},
    )
    train_rest: bool = field(
        default=False, metadata={"help": "Train embeddings, norms, biases and head in place, as pretraining needs."}
    )
    init: Literal["keep", "normalize"] = field(
        default="keep",
        metadata={"help": "'keep' leaves the weights as they are; 'normalize' scales rows to norm 1, from scratch."},
    )
    memory_mode: Literal["fast", "mem"] = field(
        default="fast",
        metadata={
            "help": "'fast' saves the input of a layer and one more activation, or with many tokens its weight with the "
            "rotations folded in, whichever is faster; 'mem' the input alone, and computes the other again."
        },
    )
    poet_scale: float = field(
        default=0.5, metadata={"help": "Learning rate of the skew entries relative to that of the rest, at block 256."}
    )
    clip_warmup: int = field(
        default=20, metadata={"help": "Steps after a merge during which the gradient norm is clipped more tightly."}
    )
    permutation_group: int = field(
        default=32,
        metadata={
            "help": "Columns that permutations move together: 32 is faster at equal loss, 1 the article's choice."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed of the permutations."})
    skew_dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None,
        metadata={
            "help": "Dtype of the trained skew entries. Default: float32, or the base model's dtype for an adapter "
            "made with autocast_adapter_dtype=False. It is saved, and holds wherever the adapter is loaded."
        },
    )
    init_weights: bool = field(
        default=True,
        metadata={"help": "Start from skew entries of zero, the identity. False draws small ones, for tests."},
    )
    base_error_bits: Literal[0, 8] = field(
        default=0,
        metadata={"help": "Extra bits kept of bf16 base weights, for more than 1000 merges; 1 byte a weight."},
    )
    track_spectrum: bool = field(
        default=False, metadata={"help": "Keep the singular values at the start, so that their drift can be reported."}
    )
    check_base: bool = field(
        default=True, metadata={"help": "Refuse to load onto a base model other than the one the adapter was made on."}
    )
    base_config: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Configuration of a base model that exists nowhere on disk, whose tensors are all saved then. Found "
            "by itself where the model names no path; pass model.config.to_dict() if it names another model's."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = POETX
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                self._check_collection(name, str, "use a list of module names, or one regular expression")
                setattr(self, name, set(value))
        if self.modules_to_save is not None:
            self._check_collection("modules_to_save", str, "use a list of module names")
            # PEFT extends it.
            self.modules_to_save = list(self.modules_to_save)
        if not isinstance(self.layers_pattern, str | None):
            self._check_collection(
                "layers_pattern", str, "use the name of the list of layers, or a list of such names"
            )
        if not isinstance(self.layers_to_transform, int | None):
            self._check_collection("layers_to_transform", int, "use the index of a layer, or a list of indices")
        if not isinstance(self.base_config, dict | None):
            raise ValueError(f"base_config={self.base_config!r}: use a dictionary, such as model.config.to_dict()")
        self._check_integer("block", 2, "a rotation needs at least 2 columns; use an integer >= 2, such as 256")
        self._check_integer("merge_interval", 0, "use a number of optimizer steps, or 0 to never merge")
        self._check_integer("clip_warmup", 0, "use a number of steps, or 0 for no warm-up")
        self._check_integer("permutation_group", 1, "use a number of columns >= 1")
        self._check_integer("seed", 0, "use an integer >= 0")
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed}: use an integer below 2**63")
        self._check_choice("init", "keep", "normalize")
        self._check_choice("memory_mode", "fast", "mem")
        self._check_choice("skew_dtype", None, "float32", "bfloat16", "float16")
        self._check_choice("base_error_bits", 0, 8)
        for name in ("train_rest", "init_weights", "track_spectrum", "check_base"):
            self._check_choice(name, False, True)
        scale = self.poet_scale
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
            raise ValueError(
                f"poet_scale={self.poet_scale!r}: use a factor > 0; to freeze an adapter, do not train it"
            )
        named_by_expression = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        for name in ("layers_to_transform", "layers_pattern"):
            if named_by_expression and getattr(self, name) is not None:
                raise ValueError(f"{name} needs target_modules as a list of names, got {self.target_modules!r}")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} needs layers_to_transform")

    def to_dict(self) -> dict[str, Any]:
        """All fields, sets sorted; a base model that was built from a configuration is named as such."""
        fields_by_name = {k: sorted(v) if isinstance(v, set) else v for k, v in super().to_dict().items()}
        if self.base_config is not None and not self.base_model_name_or_path:
            fields_by_name["base_model_name_or_path"] = NO_BASE_ON_DISK
        return fields_by_name

    def _check_collection(self, name: str, kind: type, fix: str) -> None:
        value = getattr(self, name)
        is_one = isinstance(value, str | Mapping) or not isinstance(value, Collection)
        if is_one or not all(isinstance(item, kind) for item in value):
            raise ValueError(f"{name}={value!r}: {fix}")

    def _check_integer(self, name: str, minimum: int, fix: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}={value!r}: {fix}")

    def _check_choice(self, name: str, *choices: Any) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(map(repr, choices))}")
