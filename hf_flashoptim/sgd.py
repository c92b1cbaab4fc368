"""FlashSGD and FlashSGDW."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_flashoptim.batch import Batch
from hf_flashoptim.moments import Moment, first_moment
from hf_flashoptim.ops.sgd import sgd_step, sgd_step_eager
from hf_flashoptim.optimizer import DEFAULT_MASTER_WEIGHT_BITS, FlashOptimizer, decay_factor

MOMENTUM_BUFFER = first_moment("momentum_buffer")


class FlashSGD(FlashOptimizer):
    """SGD with L2 regularization, like ``torch.optim.SGD`` (the first step is not dampened), with compressed state.

    Args:
        params: see ``FlashOptimizer``.
        lr: learning rate.
        momentum: decay rate of the momentum buffer; 0 keeps none.
        dampening: share of the gradient that the buffer leaves out.
        weight_decay: L2 coefficient, added to the gradient.
        nesterov: Nesterov momentum; needs momentum and no dampening.
        quantize: see ``FlashOptimizer``.
        compress_state_dict: see ``FlashOptimizer``.
        master_weight_bits: see ``FlashOptimizer``.
        check_numerics: see ``FlashOptimizer``.
        fused: see ``FlashOptimizer``.
        maximize: ascend.
    """

    # torch keeps a momentum buffer only after a first step.
    step_without_counter = 1.0
    _decoupled = False
    _decouple_lr = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = DEFAULT_MASTER_WEIGHT_BITS,
        check_numerics: bool = False,
        fused: bool = True,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "decouple_lr": self._decouple_lr,
        }
        super().__init__(
            params,
            lr=lr,
            quantize=quantize,
            compress_state_dict=compress_state_dict,
            master_weight_bits=master_weight_bits,
            check_numerics=check_numerics,
            fused=fused,
            defaults=defaults,
        )

    def moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """The momentum buffer, if there is momentum."""
        return (MOMENTUM_BUFFER,) if group["momentum"] else ()

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """The first step is not dampened."""
        return bool(group["momentum"])

    def check_group(self, group: dict[str, Any]) -> None:
        """See ``FlashOptimizer.check_group``."""
        super().check_group(group)
        if not group["momentum"] >= 0.0:
            raise ValueError(f"momentum={group['momentum']!r} is not valid; it must be 0 or more.")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r} is not "
                "valid; it needs momentum above 0 and dampening 0."
            )

    def step_batch(self, batch: Batch, group: dict[str, Any], lr: Tensor) -> None:
        """See ``ops/sgd.py``."""
        momentum = float(group["momentum"])
        buffers, scales = batch.moment(MOMENTUM_BUFFER) if momentum else ([], [])
        (sgd_step if self._fused else sgd_step_eager)(
            batch.params,
            batch.grads,
            buffers,
            scales,
            batch.tensors("error_bits"),
            batch.tensors("step") if momentum else [],
            lr,
            momentum,
            float(group["dampening"]),
            decay_factor(group),
            bool(group["nesterov"]),
            self._decoupled,
            bool(group["maximize"]),
        )


class FlashSGDW(FlashSGD):
    """SGD with decoupled weight decay and compressed state.

    Args:
        params: see ``FlashOptimizer``.
        lr: learning rate.
        momentum: as in ``FlashSGD``.
        dampening: as in ``FlashSGD``.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves a step.
        nesterov: as in ``FlashSGD``.
        decouple_lr: weights shrink by ``weight_decay * lr / reference_lr`` instead, see ``FlashAdamW``.
        quantize: see ``FlashOptimizer``.
        compress_state_dict: see ``FlashOptimizer``.
        master_weight_bits: see ``FlashOptimizer``.
        check_numerics: see ``FlashOptimizer``.
        fused: see ``FlashOptimizer``.
        maximize: ascend.
    """

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = DEFAULT_MASTER_WEIGHT_BITS,
        check_numerics: bool = False,
        fused: bool = True,
        maximize: bool = False,
    ) -> None:
        self._decouple_lr = decouple_lr
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            quantize=quantize,
            compress_state_dict=compress_state_dict,
            master_weight_bits=master_weight_bits,
            check_numerics=check_numerics,
            fused=fused,
            maximize=maximize,
        )
