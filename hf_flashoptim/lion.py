"""FlashLion."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_flashoptim.batch import Batch
from hf_flashoptim.moments import Moment, first_moment
from hf_flashoptim.ops.lion import lion_step, lion_step_eager
from hf_flashoptim.optimizer import DEFAULT_MASTER_WEIGHT_BITS, FlashOptimizer, decay_factor

EXP_AVG = first_moment("exp_avg")


class FlashLion(FlashOptimizer):
    """Lion with decoupled weight decay and compressed state.

    Args:
        params: see ``FlashOptimizer``.
        lr: learning rate: the size of every update.
        betas: weight of the momentum in the update, and decay rate of the momentum, in [0, 1].
        weight_decay: weights shrink by ``lr * weight_decay`` of themselves a step.
        decouple_lr: weights shrink by ``weight_decay * lr / reference_lr`` instead, see ``FlashAdamW``.
        quantize: see ``FlashOptimizer``.
        compress_state_dict: see ``FlashOptimizer``.
        master_weight_bits: see ``FlashOptimizer``.
        check_numerics: see ``FlashOptimizer``.
        fused: see ``FlashOptimizer``.
        maximize: ascend.

    Source: Chen et al. (2023).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = DEFAULT_MASTER_WEIGHT_BITS,
        check_numerics: bool = False,
        fused: bool = True,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            quantize=quantize,
            compress_state_dict=compress_state_dict,
            master_weight_bits=master_weight_bits,
            check_numerics=check_numerics,
            fused=fused,
            defaults={
                "betas": tuple(betas),
                "weight_decay": weight_decay,
                "decouple_lr": decouple_lr,
                "maximize": maximize,
            },
        )

    def moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """Mean of gradients."""
        return (EXP_AVG,)

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Lion does not depend on the step."""
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        """See ``FlashOptimizer.check_group``."""
        super().check_group(group)
        for index, beta in enumerate(group["betas"]):
            if not 0.0 <= beta <= 1.0:
                raise ValueError(f"betas[{index}]={beta!r} is not valid; it must be in [0, 1].")

    def step_batch(self, batch: Batch, group: dict[str, Any], lr: Tensor) -> None:
        """See ``ops/lion.py``."""
        beta1, beta2 = map(float, group["betas"])
        (lion_step if self._fused else lion_step_eager)(
            batch.params,
            batch.grads,
            *batch.moment(EXP_AVG),
            batch.tensors("error_bits"),
            lr,
            beta1,
            beta2,
            decay_factor(group),
            bool(group["maximize"]),
        )
