"""What one call of a step op takes."""

from dataclasses import dataclass, field

from torch import Tensor

from hf_flashoptim.moments import Moment


@dataclass
class Batch:
    """Parameters of one group that one call of a step op can take: one dtype, one kind of state, one device.

    All tensors are this rank's parts, contiguous.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def tensors(self, key: str) -> list[Tensor]:
        """One state tensor of every parameter; an empty list where this kind of state is not kept."""
        return [state[key] for state in self.states] if key in self.states[0] else []

    def moment(self, moment: Moment) -> tuple[list[Tensor], list[Tensor]]:
        """Values and scales of a moment: codes with scales, or fp32 moments and an empty list."""
        if moment.codes_key in self.states[0]:
            return self.tensors(moment.codes_key), self.tensors(moment.scale_key)
        return self.tensors(moment.name), []
