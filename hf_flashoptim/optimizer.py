"""FlashOptimizer: what all compressed optimizers share: parameter groups, state, batching, and the step."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_flashoptim import checkpoint, master_weights
from hf_flashoptim.batch import Batch
from hf_flashoptim.moments import Moment
from hf_flashoptim.ops.error_correction import ERROR_DTYPES
from hf_flashoptim.ops.layout import scale_shape
from hf_flashoptim.precision import check_learning_rate, largest_magnitude
from hf_flashoptim.sharding import check_groups_are_whole, check_not_flattened, local_part, zeros_for

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DefaultBits(int):
    """An int that remembers that nobody asked for it."""


DEFAULT_MASTER_WEIGHT_BITS = DefaultBits(24)


def decay_factor(group: dict[str, Any]) -> float:
    """What a group's learning rate is multiplied by to give the weight decay of a step."""
    return group["weight_decay"] / group["reference_lr"] if group["decouple_lr"] else float(group["weight_decay"])


class FlashOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers with compressed state.

    Matrices (two or more dimensions) keep their moments as 8-bit codes with one bf16 scale for 32 of them
    (``ops/companding.py``); vectors keep fp32 moments. Parameters in bf16 and fp16 carry error bits, which make a 24-
    or 32-bit master weight of them (``ops/error_correction.py``).

    A gradient that is inf or NaN makes the weight it belongs to non-finite and, from the next step on, at most the
    other members of its group of 32 (for vectors, nothing else); no other parameter is touched.

    Args:
        params: parameters, named parameters, or groups of them. A group may set every hyperparameter, also
            ``quantize`` and ``master_weight_bits``.
        lr: learning rate, a float or a tensor of shape ``[]`` (on the parameters' device it can change inside a CUDA
            graph).
        quantize: keep moments of matrices in 8 bits; else in fp32.
        compress_state_dict: ``state_dict()`` holds the codes, so that training resumes bit for bit; else fp32 moments
            under torch's names, which ``torch.optim`` loads.
        master_weight_bits: 24 or 32, width of the master weights of 16-bit parameters; None for none. fp32 parameters
            need none, and for them the default is ignored.
        check_numerics: raise ``NumericsError`` when the learning rate cannot change a parameter's largest weights.
        fused: run one kernel for many parameters; False runs the same step as separate PyTorch operations, which on
            a GPU is slow and for debugging. On a CPU there is no difference.
        defaults: hyperparameters of a subclass.

    Raises:
        ValueError: for a hyperparameter out of range, a parameter dtype other than fp32, bf16 and fp16, one that FSDP1
            has flattened, or ``master_weight_bits`` given where no parameter has 16 bits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = DEFAULT_MASTER_WEIGHT_BITS,
        check_numerics: bool = False,
        fused: bool = True,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self._compress_state_dict = compress_state_dict
        self._check_numerics = check_numerics
        self._fused = fused
        self._largest: dict[int, float] = {}
        bits = int(master_weight_bits) if isinstance(master_weight_bits, DefaultBits) else master_weight_bits
        super().__init__(params, {**(defaults or {}), "lr": lr, "quantize": quantize, "master_weight_bits": bits})
        dtypes = {p.dtype for group in self.param_groups for p in group["params"]}
        if master_weight_bits is not None and master_weight_bits is not DEFAULT_MASTER_WEIGHT_BITS:
            if dtypes == {torch.float32}:
                raise ValueError(
                    f"master_weight_bits={master_weight_bits} has no effect: all parameters are fp32, which need no "
                    "error bits. Leave it out, or cast the model to bf16 (cast_model)."
                )
        if master_weight_bits is None and dtypes - {torch.float32}:
            warnings.warn(
                "master_weight_bits=None: 16-bit parameters are updated without error bits, so small updates round "
                "to nothing. Set master_weight_bits=24.",
                stacklevel=3,
            )

    def moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """The moments kept for parameters of a group."""
        raise NotImplementedError

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Whether parameters of a group keep a step counter."""
        raise NotImplementedError

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyperparameter out of range."""
        checks = {"lr": group["lr"] >= 0, "weight_decay": group["weight_decay"] >= 0}
        checks["master_weight_bits"] = group["master_weight_bits"] in (None, *ERROR_DTYPES)
        for name, valid in checks.items():
            if not valid:
                wanted = "one of None, 24, 32" if name == "master_weight_bits" else "0 or more"
                raise ValueError(f"{name}={group[name]!r} is not valid; it must be {wanted}.")
        if group["decouple_lr"] and not group["reference_lr"] > 0:
            raise ValueError("decouple_lr=True divides by the initial learning rate; construct with lr above 0.")

    def step_batch(self, batch: Batch, group: dict[str, Any], lr: Tensor) -> None:
        """Run the step op of this optimizer once."""
        raise NotImplementedError

    # How small a typical update is, relative to the learning rate (for check_numerics).
    smallest_step = 1.0
    # Step counter for saved state that has none; None where it must have one.
    step_without_counter: float | None = None
    # The GradientReleaseHandle while gradient release is on.
    gradient_release: Any = None
    # Whether the parameters given had rows; DeepSpeed puts flat ones in their place.
    _had_matrices = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its hyperparameters and dtypes; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # A key of our own: schedulers write `initial_lr`, and take it for the rate wherever they find it.
        group.setdefault("reference_lr", float(group.get("initial_lr", group["lr"])))
        try:
            self.check_group(group)
            for p in group["params"]:
                if p.dtype not in PARAMETER_DTYPES:
                    raise ValueError(
                        f"A parameter of shape {tuple(p.shape)} has dtype {p.dtype}; {type(self).__name__} steps "
                        "parameters in torch.float32, torch.bfloat16 and torch.float16."
                    )
                check_not_flattened(p)
        except ValueError:
            self.param_groups.pop()
            raise
        self._had_matrices |= any(p.ndim >= 2 for p in group["params"])

    def is_quantized(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter's moments are kept as codes: decided by its global shape."""
        return bool(group["quantize"]) and p.ndim >= 2

    def error_dtype(self, p: Tensor, group: dict[str, Any]) -> torch.dtype | None:
        """int8 or int16 for parameters with error bits, else None."""
        return None if p.dtype == torch.float32 else ERROR_DTYPES.get(group["master_weight_bits"])

    def initial_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of a parameter before its first step: zeros throughout.

        Raises:
            ValueError: if it is to be quantized and is sharded along its groups.
        """
        state = {}
        if self.counts_steps(group):
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(p).device)
        if self.is_quantized(p, group):
            check_groups_are_whole(p)
            for moment in self.moments(group):
                state[moment.codes_key] = zeros_for(p, moment.code_dtype)
                state[moment.scale_key] = zeros_for(p, torch.bfloat16, scale_shape)
        else:
            state.update({moment.name: zeros_for(p, torch.float32) for moment in self.moments(group)})
        if error_dtype := self.error_dtype(p, group):
            state["error_bits"] = zeros_for(p, error_dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            ValueError: for a sparse or complex gradient.
            NumericsError: see ``check_numerics``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_gradients(group["params"])  # of all before any is stepped
        for group in self.param_groups:
            self._step_params(group["params"], group)
        return loss

    @torch.no_grad()
    def step_param(self, p: Tensor, group: dict[str, Any] | None = None) -> None:
        """Step one parameter, if it has a gradient.

        Args:
            p: a parameter of this optimizer.
            group: its group; looked up if None.
        """
        self.step_params([p], self.group_of(p) if group is None else group)

    @torch.no_grad()
    def step_params(self, params: Iterable[Tensor], group: dict[str, Any]) -> None:
        """Step those of these parameters that have a gradient (what gradient release calls).

        Args:
            params: parameters of one group of this optimizer.
            group: this group.
        """
        params = list(params)
        self._check_gradients(params)
        self._step_params(params, group)

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """The group that a parameter is in.

        Raises:
            ValueError: if it is in none.
        """
        for group in self.param_groups:
            if any(p is other for other in group["params"]):
                return group
        raise ValueError(f"A parameter of shape {tuple(p.shape)} does not belong to this optimizer.")

    def _step_params(self, params: Iterable[Tensor], group: dict[str, Any]) -> None:
        batches: dict[tuple[Any, ...], Batch] = {}
        write_back = []
        for p in params:
            grad = p.grad
            if grad is None:
                continue
            state = self.ensure_state(p, group)
            if self._check_numerics:
                self._check_learning_rate(p, group)
            whole = p.detach()
            if isinstance(p, DTensor):
                whole, grad = local_part(whole), local_part(grad)
                state = {name: local_part(tensor) for name, tensor in state.items()}
            local = whole
            if not whole.is_contiguous():
                local = whole.contiguous()
                write_back.append((whole, local))
            errors = state.get("error_bits")
            key = (local.device, local.dtype, None if errors is None else errors.dtype, tuple(state))
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Batch()
            batch.params.append(local)
            batch.grads.append(grad.contiguous())
            batch.states.append(state)
        if batches:
            lr = group["lr"]
            lr = lr if isinstance(lr, Tensor) else torch.scalar_tensor(lr, dtype=torch.float64)
            for batch in batches.values():
                self.step_batch(batch, group, lr)
        for whole, local in write_back:
            whole.copy_(local)

    def ensure_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of a parameter, made where it is missing: at its first step, or when its group turns momentum on."""
        state = self.state.get(p, {})
        if not state or self._lacks_a_moment(state, group):
            check_not_flattened(p)  # wrapped after this optimizer was made
            self._check_not_replaced()
            state = {**self.initial_state(p, group), **state}
            if state:  # SGD without momentum may keep none
                self.state[p] = state
        errors = state.get("error_bits")
        wanted = self.error_dtype(p, group)
        if (None if errors is None else errors.dtype) != wanted:
            master_weights.refit_error_bits(p, state, wanted)
            self.state[p] = state
        return state

    def _lacks_a_moment(self, state: dict[str, Tensor], group: dict[str, Any]) -> bool:
        for moment in self.moments(group):
            if moment.codes_key not in state and moment.name not in state:
                return True
        return False

    def _check_not_replaced(self) -> None:
        if self._had_matrices and all(p.ndim < 2 for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "The parameters of this optimizer have been replaced by flat ones, as DeepSpeed's ZeRO does: without "
                "rows, moments cannot be quantized. Use DDP or FSDP2 (fully_shard), or another optimizer."
            )

    @staticmethod
    def _check_gradients(params: Iterable[Tensor]) -> None:
        for p in params:
            grad = p.grad
            if grad is not None and (grad.layout != torch.strided or grad.is_complex()):
                kind = "complex" if grad.is_complex() else "sparse"
                raise ValueError(
                    f"The gradient of a parameter of shape {tuple(p.shape)} is {kind}; compressed optimizers take dense, "
                    "real gradients. Make it dense (for embeddings, sparse=False)."
                )

    def _check_learning_rate(self, p: Tensor, group: dict[str, Any]) -> None:
        if id(p) not in self._largest:
            self._largest[id(p)] = largest_magnitude(p)
        bits = group["master_weight_bits"] if self.error_dtype(p, group) else None
        check_learning_rate(p, float(group["lr"]) * self.smallest_step, self._largest[id(p)], bits)

    def recompute_param_stats(self) -> None:
        """Measure every parameter's largest magnitude again, for the next ``check_numerics``."""
        self._largest = {id(p): largest_magnitude(p) for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def reset_state(self, params: Iterable[Tensor]) -> None:
        """Return the state of exactly these parameters to what it was before their first step, in place.

        Moments, step counters and error bits become zero; the tensors stay, so checkpoints keep their keys.

        Args:
            params: parameters of this optimizer; those without state yet are left without.

        Raises:
            ValueError: if one does not belong to this optimizer; then none is reset.
        """
        params = list(params)
        for p in params:
            self.group_of(p)
        for p in params:
            for tensor in self.state.get(p, {}).values():
                local_part(tensor).zero_()

    def state_dict(self) -> dict[str, Any]:
        """State as plain tensors and numbers; see ``checkpoint.py`` for the formats."""
        return checkpoint.to_state_dict(self, super().state_dict(), compress=self._compress_state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of the matching ``torch.optim`` class, or of flashoptim 0.1.4.

        The format follows this optimizer's groups: moments are quantized or decoded as ``quantize`` says and error
        bits converted to ``master_weight_bits``; other hyperparameters are taken from the state dict. Load the model
        first: a flashoptim state dict is converted with the parameters' values.

        Args:
            state_dict: what ``state_dict()`` returned.

        Raises:
            ValueError: if it does not fit, saying where; the optimizer is then unchanged.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state, groups = checkpoint.from_state_dict(self, state_dict)
        self.__setstate__({"state": state, "param_groups": groups})
        self._largest.clear()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        options = ("_compress_state_dict", "_check_numerics", "_fused")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in options}, "_largest": {}}

    def get_fp32_model_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The model's state dict with every floating tensor in fp32, and master weights where there are error bits.

        Args:
            model: the model whose parameters this optimizer steps, or its DistributedDataParallel wrapper.
        """
        return master_weights.fp32_model_state_dict(self, model)

    @torch.no_grad()
    def set_fp32_model_state_dict(self, model: torch.nn.Module, fp32_state_dict: dict[str, Tensor]) -> None:
        """Inverse of ``get_fp32_model_state_dict``: split fp32 weights into parameters and error bits.

        Args:
            model: as there.
            fp32_state_dict: fp32 tensors by name; names that it lacks keep their values.

        Raises:
            ValueError: for a floating tensor that is not fp32, or another shape; nothing has then been changed.
        """
        master_weights.load_fp32_model_state_dict(self, model, fp32_state_dict)
