"""FlashAdam and FlashAdamW."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_flashoptim.batch import Batch
from hf_flashoptim.moments import Moment, first_moment, second_moment
from hf_flashoptim.ops.adam import adam_step, adam_step_eager
from hf_flashoptim.optimizer import DEFAULT_MASTER_WEIGHT_BITS, FlashOptimizer, decay_factor

EXP_AVG = first_moment("exp_avg")
EXP_AVG_SQ = second_moment("exp_avg_sq")


class FlashAdam(FlashOptimizer):
    """Adam with L2 regularization, like ``torch.optim.Adam``, with compressed state.

    Args:
        params: see ``FlashOptimizer``.
        lr: learning rate.
        betas: decay rates of the mean of gradients and of the mean of their squares, in [0, 1).
        eps: added to the denominator, 0 or more.
        weight_decay: L2 coefficient, added to the gradient.
        quantize: see ``FlashOptimizer``.
        compress_state_dict: see ``FlashOptimizer``.
        master_weight_bits: see ``FlashOptimizer``.
        check_numerics: see ``FlashOptimizer``.
        fused: see ``FlashOptimizer``.
        maximize: ascend.
    """

    # Adam divides by the gradient's own size, so updates may be any fraction of the learning rate: a tenth is usual.
    smallest_step = 0.1
    _decoupled = False
    _decouple_lr = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = DEFAULT_MASTER_WEIGHT_BITS,
        check_numerics: bool = False,
        fused: bool = True,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
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
        """Mean of gradients and mean of their squares."""
        return EXP_AVG, EXP_AVG_SQ

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """For the bias correction."""
        return True

    def check_group(self, group: dict[str, Any]) -> None:
        """See ``FlashOptimizer.check_group``."""
        super().check_group(group)
        for index, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}]={beta!r} is not valid; it must be in [0, 1).")
        if not group["eps"] >= 0.0:
            raise ValueError(f"eps={group['eps']!r} is not valid; it must be 0 or more.")

    def step_batch(self, batch: Batch, group: dict[str, Any], lr: Tensor) -> None:
        """See ``ops/adam.py``."""
        beta1, beta2 = map(float, group["betas"])
        (adam_step if self._fused else adam_step_eager)(
            batch.params,
            batch.grads,
            *batch.moment(EXP_AVG),
            *batch.moment(EXP_AVG_SQ),
            batch.tensors("error_bits"),
            batch.tensors("step"),
            lr,
            beta1,
            beta2,
            float(group["eps"]),
            decay_factor(group),
            self._decoupled,
            bool(group["maximize"]),
        )


class FlashAdamW(FlashAdam):
    """AdamW, like ``torch.optim.AdamW``, with compressed state: 5 bytes a bf16 parameter, itself included.

    Args:
        params: see ``FlashOptimizer``.
        lr: learning rate.
        betas: as in ``FlashAdam``.
        eps: as in ``FlashAdam``.
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves a step.
        decouple_lr: weights shrink by ``weight_decay * lr / lr_0`` instead, lr_0 being the group's ``reference_lr``, its
            rate at construction, so that ``weight_decay`` is the decay of a step and follows only the schedule.
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            quantize=quantize,
            compress_state_dict=compress_state_dict,
            master_weight_bits=master_weight_bits,
            check_numerics=check_numerics,
            fused=fused,
            maximize=maximize,
        )
