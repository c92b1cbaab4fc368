"""The POET-X tuner: which modules of a model are wrapped, and PEFT's contract around them."""

import warnings
from typing import Any, ClassVar

import torch
from peft import PeftModel, get_peft_model
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers
from peft.utils.quantization_utils import (
    ForwardOnlyQuantizationBackend,
    get_quantization_kwargs,
    resolve_quantization_backend,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .checkpoint import adapter_state_dict, canonical_name, poetx_layers, rest_parameters, restore_base
from .config import NO_BASE_ON_DISK, PoetXConfig
from .layer import PoetXLayer, PoetXLinear


class PoetXModel(BaseTuner):
    """Wraps the linear layers of a model between trained block-diagonal orthogonal transforms.

    Made by `get_poetx_model` or `peft.get_peft_model`.

    Source: POET-X.
    """

    prefix = "poetx_"
    tuner_layer_cls = PoetXLayer
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}

    # Who calls the periodic merge: "Trainer", "attach_merging", "merge_step", or None while nobody does.
    clock: str | None = None
    _steps_seen = 0
    _last_version = -1

    def _prepare_adapter_config(self, peft_config: PoetXConfig, model_config: dict[str, Any]) -> PoetXConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = "all-linear"
        return peft_config

    def _prepare_model(self, peft_config: PoetXConfig, model: nn.Module) -> None:
        if peft_config.target_modules == "all-linear":
            _maybe_include_all_linear_layers(peft_config, model)
            peft_config.target_modules = {name for name in peft_config.target_modules if not _is_router(name)}
        self._check_shared_weights(peft_config, model)
        self._note_missing_base(peft_config, model)
        if not any(True for _ in poetx_layers(model)):
            _warn_about_experts(model)
        if "poetx_step" not in self._modules:
            self.poetx_step = BufferDict({}, persistent=True)
        for name, config in self.peft_config.items():
            if config is peft_config:
                self.poetx_step[name] = torch.zeros((), dtype=torch.int64)

    def _check_shared_weights(self, peft_config: PoetXConfig, model: nn.Module) -> None:
        """Refuse a target whose weight is tied to another module's, which a merge would change with it."""
        owners: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and len(owners[id(weight)]) > 1:
                if self._check_target_module_exists(peft_config, name) and not isinstance(module, PoetXLayer):
                    raise ValueError(
                        f"target {name!r} shares its weight with {owners[id(weight)]}; a merge into it would change "
                        "them all. Leave it out of target_modules (train_rest=True trains it in place), or untie it"
                    )

    def _note_missing_base(self, peft_config: PoetXConfig, model: nn.Module) -> None:
        """Keep the configuration of a model that was built from one, since no folder holds it."""
        if peft_config.base_model_name_or_path == NO_BASE_ON_DISK:
            peft_config.base_model_name_or_path = ""
        if peft_config.base_config is None and not peft_config.inference_mode and hasattr(model, "config"):
            if not getattr(model, "name_or_path", None) and not peft_config.base_model_name_or_path:
                peft_config.base_config = self.get_model_config(model)

    def _check_new_adapter_config(self, config: PoetXConfig) -> None:
        super()._check_new_adapter_config(config)
        for name, other in self.peft_config.items():
            if other is config and name in self.prefix:
                raise ValueError(
                    f"adapter name {name!r} is part of the parameter prefix {self.prefix!r}, which PEFT searches names "
                    "for; use another name, such as 'default'"
                )
        if any(any(map(int, layer.poetx_merge_count.values())) for _, layer in poetx_layers(self.model)):
            raise ValueError(
                "cannot add an adapter: the base weights have absorbed merges of another one and are no longer the "
                "original; train with merge_interval=0 to keep several adapters on one base"
            )

    def _create_and_replace(
        self,
        peft_config: PoetXConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, PoetXLayer):
            target.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
            return
        backend = _quantization_backend(self.model, target)
        if not isinstance(target, nn.Linear | Conv1D) and (backend is None or backend.layer_type != "linear"):
            raise TypeError(
                f"target {current_key!r} is a {type(target).__name__}; POET-X wraps linear layers (nn.Linear, Conv1D "
                "and their quantized kinds). Leave it out of target_modules"
            )
        if backend is not None and peft_config.merge_interval:
            raise ValueError(
                f"target {current_key!r} is quantized, and a periodic merge cannot be written back truly; "
                f"use PoetXConfig(merge_interval=0) instead of merge_interval={peft_config.merge_interval}"
            )
        layer = PoetXLinear(target, adapter_name, canonical_name(current_key), peft_config, backend)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None:
        super()._mark_only_adapters_as_trainable(model)
        for adapter_name in self.active_adapters:
            config = self.peft_config[adapter_name]
            if config.train_rest and not config.inference_mode:
                for _, parameter in rest_parameters(model):
                    parameter.requires_grad_(True)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Nothing: `skew_dtype` in the config decides, also when an adapter is loaded."""

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        del self.poetx_step[adapter_name]

    def disable_adapter_layers(self) -> None:
        """Run the base model alone; refused while training merges into it, since it is no longer the original."""
        if self.clock is not None and any(config.merge_interval for config in self.peft_config.values()):
            raise ValueError(
                "disabling the adapter does not give the original model while periodic merges change the base weights, "
                "as a reference model for DPO needs; train with PoetXConfig(merge_interval=0) or pass a ref_model"
            )
        super().disable_adapter_layers()

    def unload(self) -> nn.Module:
        """The base model without adapters; after periodic merges its weights are not the original ones."""
        if any(any(map(int, layer.poetx_merge_count.values())) for _, layer in poetx_layers(self.model)):
            warnings.warn(
                "unload() returns base weights that have absorbed earlier merges, without the transforms trained since; "
                "merge_and_unload() returns the trained model",
                stacklevel=2,
            )
        return super().unload()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._remind_of_merging()
        return super().forward(*args, **kwargs)

    def _remind_of_merging(self) -> None:
        """Tell a hand-written loop that trains past the first merge and never calls it."""
        interval = max((self.peft_config[name].merge_interval for name in self.active_adapters), default=0)
        if self.clock is not None or not interval or self._steps_seen > interval:
            return
        skew = next((p for _, layer in poetx_layers(self.model) for p in layer.poetx_skew_in.values()), None)
        if skew is None or skew._version == self._last_version:
            return
        # An optimizer's in-place update raises the version; the first sight of it is no step.
        self._steps_seen += self._last_version >= 0
        self._last_version = skew._version
        if self._steps_seen > interval:
            warnings.warn(
                f"{self._steps_seen} optimizer steps without a merge, and merge_interval={interval}: call "
                "merge_step(model, optimizer) after optimizer.step(), or attach_merging(model, optimizer) once, "
                "or use PoetXConfig(merge_interval=0)",
                stacklevel=3,
            )

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PoetXConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        return adapter_state_dict(model, config, adapter_name, state_dict)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PoetXConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        rest = restore_base(model, config, adapter_name, state_dict)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, rest)


def get_poetx_model(model: nn.Module, config: PoetXConfig | None = None, adapter_name: str = "default") -> PeftModel:
    """Wrap a causal language model, or any model with linear layers, with POET-X.

    Args:
        model: from transformers or plain torch; it is changed in place.
        config: `PoetXConfig()` if None.
        adapter_name: of the new adapter.

    Returns:
        The PEFT model, whose outputs equal the unwrapped model's until it is trained.

    Raises:
        ValueError: if no target is found, or a target cannot be wrapped.

    Example:
        >>> model = get_poetx_model(torch.nn.Sequential(torch.nn.Linear(8, 4)), PoetXConfig(block=4))
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        18
    """
    return get_peft_model(model, config or PoetXConfig(), adapter_name=adapter_name)


def _is_router(name: str) -> bool:
    """Whether a linear layer only chooses experts: a rotation of its few outputs would mix the choices."""
    last = name.rpartition(".")[2]
    return last in ("gate", "router") or last.endswith(("_gate", "_router"))


def _warn_about_experts(model: nn.Module) -> None:
    """Say which stacked expert weights stay frozen, since no linear layer holds them."""
    experts = [name for name, p in model.named_parameters() if p.dim() == 3 and not name.endswith(".bias")]
    experts = [name for name in experts if "expert" in name]
    if experts:
        warnings.warn(
            f"{len(experts)} stacked expert weights stay frozen, for example {experts[0]!r}: POET-X wraps linear layers",
            stacklevel=2,
        )


def _quantization_backend(model: nn.Module, target: nn.Module) -> Any:
    base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    try:
        return resolve_quantization_backend(base, **get_quantization_kwargs(model))
    except ValueError:
        # torchao without a transformers quantizer cannot requantize; its forward pass still works.
        return ForwardOnlyQuantizationBackend("torchao")
