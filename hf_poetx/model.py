"""The POET-X tuner: which modules of a model are wrapped, and PEFT's contract around them."""

import contextlib
import copy
import warnings
import weakref
from typing import Any, ClassVar

import torch
import transformers
from peft import PeftModel, get_peft_model
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .checkpoint import (
    adapter_state_dict,
    canonical_name,
    poetx_layers,
    rest_parameters,
    restore_base,
)
from .config import NO_BASE_ON_DISK, PoetXConfig
from .layer import PoetXLayer
from .linear import PoetXLinear
from .targets import bypassed_names, check_targets, head_names, quantization_backend, router_names, warn_about_experts

# All tuners there are.
_tuners: weakref.WeakSet["PoetXModel"] = weakref.WeakSet()


def _remind_of_merging(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for tuner in list(_tuners):
            tuner._remind_of_merging(optimizer)


# Sees steps of compiled models too, and of fused optimizers, which raise no parameter's version.
register_optimizer_step_post_hook(_remind_of_merging)


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
    # Whether an adapter was deleted after its merges, or training of the rest, had changed the base weights.
    _base_was_changed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _tuners.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The clock of a model does not merge its copies.
        self.clock, self._steps_seen = None, 0
        _tuners.add(self)

    def _prepare_adapter_config(self, peft_config: PoetXConfig, model_config: dict[str, Any]) -> PoetXConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = "all-linear"
        return peft_config

    def _prepare_model(self, peft_config: PoetXConfig, model: nn.Module) -> None:
        if peft_config.target_modules == "all-linear":
            _maybe_include_all_linear_layers(peft_config, model)
            heads = head_names(model, peft_config.task_type)
            peft_config.target_modules -= {*router_names(model), *bypassed_names(model), *heads}
            if peft_config.layers_to_transform is not None:
                self._keep_layers_to_transform(peft_config)
        check_targets(model, peft_config, lambda name: self._check_target_module_exists(peft_config, name))
        self._note_missing_base(peft_config, model)
        if not any(True for _ in poetx_layers(model)):
            warn_about_experts(model)
        if "poetx_step" not in self._modules:
            self.poetx_step = BufferDict({}, persistent=True)
        for name, config in self.peft_config.items():
            if config is peft_config:
                self.poetx_step[name] = torch.zeros((), dtype=torch.int64)

    def _keep_layers_to_transform(self, peft_config: PoetXConfig) -> None:
        """Narrow down whole names of targets, for which PEFT does not look at layers_to_transform."""
        by_last_part = copy.copy(peft_config)
        by_last_part.target_modules = {name.rpartition(".")[2] for name in peft_config.target_modules}
        peft_config.target_modules = {
            name for name in peft_config.target_modules if self._check_target_module_exists(by_last_part, name)
        }

    def _note_missing_base(self, peft_config: PoetXConfig, model: nn.Module) -> None:
        """Keep the configuration of a model that was built from one, since no folder holds it."""
        if peft_config.base_model_name_or_path == NO_BASE_ON_DISK:
            peft_config.base_model_name_or_path = ""
        if peft_config.base_config is None and not peft_config.inference_mode and hasattr(model, "config"):
            if not getattr(model, "name_or_path", None) and not peft_config.base_model_name_or_path:
                peft_config.base_config = self.get_model_config(model)
        if peft_config.base_config is not None and not peft_config.base_config.get("architectures"):
            # A configuration names the class only once its model was saved; pipelines and converters ask for it.
            if getattr(transformers, type(model).__name__, None) is type(model):
                peft_config.base_config = {**peft_config.base_config, "architectures": [type(model).__name__]}

    def _check_new_adapter_config(self, config: PoetXConfig) -> None:
        super()._check_new_adapter_config(config)
        names = [name for name, other in self.peft_config.items() if other is config]
        for name in names:
            if name in self.prefix:
                raise ValueError(
                    f"adapter name {name!r} is part of the parameter prefix {self.prefix!r}, which PEFT searches names "
                    "for; use another name, such as 'default'"
                )
        if self._base_was_changed:
            raise ValueError(
                "cannot add an adapter: the adapter that was deleted has changed the base weights, so that they are no "
                "longer the original, and no file would say so; save the model that unload() returns, and load that"
            )
        if len(self.peft_config) == 1:
            return
        if any(layer.has_absorbed_merges for _, layer in poetx_layers(self.model)):
            raise ValueError(
                "cannot add an adapter: the base weights have absorbed merges of another one and are no longer the "
                "original; train with merge_interval=0 to keep several adapters on one base"
            )
        if any(other.train_rest for other in self.peft_config.values()):
            raise ValueError(
                "train_rest=True trains the base model's embeddings, norms and head in place, under every adapter of "
                "it; with several adapters use train_rest=False for all, and modules_to_save"
            )
        if len({other.init for other in self.peft_config.values()}) > 1:
            raise ValueError("init='normalize' changes the base weights under every adapter; use one init for all")

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
        backend = quantization_backend(self.model, target)
        layer = PoetXLinear(target, adapter_name, canonical_name(current_key), peft_config, backend)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if isinstance(new_module, PoetXLayer) or isinstance(child, TrainableTokensWrapper):
            # It is on its device already. PEFT would move the adapter of an offloaded layer to none, and lose it, and
            # give an embedding, for its own weight, that of its wrapper, which is no parameter.
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None:
        super()._mark_only_adapters_as_trainable(model)
        for adapter_name in self.active_adapters:
            config = self.peft_config[adapter_name]
            if config.train_rest and not config.inference_mode:
                for _, parameter in rest_parameters(model):
                    parameter.requires_grad_(True)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """As any tuner's; what `train_rest` trains is trained, or frozen, with the adapter."""
        super().set_adapter(adapter_name, inference_mode)
        if any(self.peft_config[name].train_rest for name in self.active_adapters):
            for _, parameter in rest_parameters(self.model):
                parameter.requires_grad_(not inference_mode)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Settle an adapter's `skew_dtype` when it is made; afterwards it holds, also wherever it is loaded."""
        config = self.peft_config[adapter_name]
        if config.skew_dtype is not None:
            return
        layers = [layer for _, layer in poetx_layers(self.model) if adapter_name in layer.poetx_config]
        _, dtype = layers[0]._get_base_layer_device_and_dtype(layers[0].get_base_layer())
        if autocast_adapter_dtype or dtype not in (torch.bfloat16, torch.float16):
            dtype = torch.float32
        config.skew_dtype = str(dtype).removeprefix("torch.")
        for layer in layers:
            for parameter in layer.skew_parameters(adapter_name):
                parameter.data = parameter.data.to(dtype)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Write the effective weights into the base model; `unmerge_adapter` restores it bit for bit.

        Raises:
            ValueError: if a skew entry is not finite, naming the layer; nothing is merged then.
        """
        self._check_finite(adapter_names)
        super().merge_adapter(adapter_names, safe_merge)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            self._check_finite(adapter_names)
        return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    def _check_finite(self, adapter_names: list[str] | None) -> None:
        """All layers before the first is merged, so that a refused merge leaves no half-merged model."""
        names = self.active_adapters if adapter_names is None else adapter_names
        for _, layer in poetx_layers(self.model):
            for name in set(names) & set(layer.poetx_config):
                layer.check_finite(name)

    def delete_adapter(self, adapter_name: str) -> None:
        """As any tuner's; after periodic merges the weights that stay are not the original ones."""
        if adapter_name in self.peft_config:
            self._warn_of_absorbed_merges("delete_adapter()")
        changed = self._base_is_changed
        super().delete_adapter(adapter_name)
        self._base_was_changed |= changed
        del self.poetx_step[adapter_name]

    def disable_adapter_layers(self) -> None:
        """Run the base model alone, which must be the original one: ``disable_adapter()`` calls this.

        Raises:
            ValueError: if the base weights have absorbed periodic merges, or `train_rest` has trained the rest of the
                base model in place, since the original is gone then; and while
                training is going to merge, also before its first merge, since a reference model would change under
                it. Training lasts as long as ``Trainer.train()``, and in a loop with `merge_step` or `attach_merging`
                as long as the model is in training mode: after ``model.eval()`` only absorbed merges are refused.
        """
        fix = "load the base model apart, as a ref_model in TRL, or train with PoetXConfig(merge_interval=0)"
        if any(layer.has_absorbed_merges for _, layer in poetx_layers(self.model)):
            raise ValueError(
                "the base weights have absorbed periodic merges, so disabling the adapter would not give the original "
                f"model; {fix}"
            )
        if any(config.train_rest for config in self.peft_config.values()):
            raise ValueError(
                "train_rest=True trains the base model's embeddings, norms and head in place, so disabling the adapter "
                "does not give the original model; load the base model apart, as a ref_model in TRL"
            )
        due = self.clock is not None and any(config.merge_interval for config in self.peft_config.values())
        if due and (self.clock == "Trainer" or self.training):
            over = "" if self.clock == "Trainer" else "; if training is over, call model.eval() first"
            raise ValueError(
                "disabling the adapter does not give a lasting reference model while training merges it into the base "
                f"weights periodically; {fix}{over}"
            )
        super().disable_adapter_layers()

    def unload(self) -> nn.Module:
        """The base model without adapters; after periodic merges its weights are not the original ones."""
        self._warn_of_absorbed_merges("unload()")
        return super().unload()

    @property
    def _base_is_changed(self) -> bool:
        merged = any(layer.has_absorbed_merges for _, layer in poetx_layers(self.model))
        return merged or any(config.train_rest for config in self.peft_config.values())

    def _warn_of_absorbed_merges(self, method: str) -> None:
        merged = any(layer.has_absorbed_merges for _, layer in poetx_layers(self.model))
        if self._base_is_changed:
            trained = "absorbed earlier merges" if merged else "embeddings, norms and head as train_rest trained them"
            warnings.warn(
                f"{method} leaves base weights that have {trained}, without the transforms trained since; "
                "merge_and_unload() returns the trained model",
                stacklevel=3,
            )

    def _enable_peft_forward_hooks(
        self, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> contextlib.AbstractContextManager:
        """PEFT calls it before every forward pass and generation, with their arguments."""
        if adapter_names is not None:
            raise ValueError(
                f"adapter_names={adapter_names!r}: POET-X cannot mix adapters within a batch; choose one with "
                "set_adapter() and call the model once for each"
            )
        return contextlib.nullcontext()

    def _remind_of_merging(self, optimizer: Optimizer) -> None:
        """Tell a hand-written loop that trains past the first merge and never calls it, after an optimizer's step."""
        interval = max((self.peft_config[name].merge_interval for name in self.active_adapters), default=0)
        if self.clock is not None or not interval or self._steps_seen > interval:
            return
        skew = next((p for _, layer in poetx_layers(self.model) for p in layer.parameters() if p.requires_grad), None)
        if skew is None or not any(p is skew for group in optimizer.param_groups for p in group["params"]):
            return
        self._steps_seen += 1
        if self._steps_seen > interval:
            warnings.warn(
                f"{self._steps_seen} optimizer steps without a merge, and merge_interval={interval}: call "
                "merge_step(model, optimizer) after optimizer.step(), or attach_merging(model, optimizer) once, "
                "or use PoetXConfig(merge_interval=0)",
                stacklevel=4,
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
        if config.base_config is not None and hasattr(model, "config"):
            # The model may have been changed since, by resize_token_embeddings for example.
            architectures = config.base_config.get("architectures")
            config.base_config = cls.get_model_config(model) | {"architectures": architectures}
        return adapter_state_dict(model, config, adapter_name, state_dict)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # Only where it is one: a base tensor's name may hold the word, as "norm.weight" holds that of adapter "norm".
        return super()._remove_adapter_name_from_key(key, adapter_name) if cls.prefix in key else key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PoetXConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        return restore_base(model, config, adapter_name, state_dict)


def get_poetx_model(model: nn.Module, config: PoetXConfig | None = None, adapter_name: str = "default") -> PeftModel:
    """Wrap a causal language model, or any model with linear layers, with POET-X.

    Args:
        model: from transformers or plain torch; it is changed in place.
        config: `PoetXConfig()` if None; the model keeps a copy.
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
    config = PoetXConfig() if config is None else copy.deepcopy(config)
    return get_peft_model(model, config, adapter_name=adapter_name)
