"""The cost of one micro-batch in a piece of a model, which the simulator and the splits work on."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from shardwise.base.schedules import HALVING


@dataclass(frozen=True)
class Cost:
    """The cost of one micro-batch in a unit (the embedding, a decoder layer, or head and loss).

    `+` joins neighbouring units into a chunk. Where nothing was measured, seconds are FLOPs
    divided by a rate.
    """

    name: str
    forward_seconds: float
    input_seconds: float
    """Backward: the gradients of the unit's input and of all activations inside the unit."""
    weight_seconds: float
    """Backward: the gradients of trainable weights. A frozen weight has none."""
    activation_bytes: int
    """Activations that the forward keeps for the backward, the unit's input included."""
    output_bytes: int
    """The activation that is sent to the next unit. Its gradient, sent back, is as large."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    parameters: int = 0
    trainable: bool = True
    """Whether some parameter of the unit is trained."""
    split_seconds: float = 0.0
    """Extra time of the backward where its two halves run separately."""
    backward: bool = True
    """Whether the backward passes through the unit."""
    stage_seconds: float = 0.0
    """Time that a stage's forward takes around its units, however many they are.

    It is not part of `forward_seconds`.
    """
    output_seconds: float = 0.0
    """Time to send `output_bytes`, where it was measured."""

    @property
    def backward_seconds(self) -> float:
        """The whole backward."""
        return self.input_seconds + self.weight_seconds

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def state_bytes(self) -> int:
        """Memory that the unit takes between steps: weights, gradients and optimizer states."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, above: "Cost") -> "Cost":
        """Join the unit with the unit `above` it, whose output is the output of both."""
        not_summed = ("name", "output_bytes", "output_seconds", "stage_seconds")
        not_summed += ("trainable", "backward")
        summed = {
            field.name: getattr(self, field.name) + getattr(above, field.name)
            for field in fields(Cost)
            if field.name not in not_summed
        }
        return Cost(
            name=f"{self.name.split(' to ')[0]} to {above.name.split(' to ')[-1]}",
            output_bytes=above.output_bytes,
            output_seconds=above.output_seconds,
            stage_seconds=max(self.stage_seconds, above.stage_seconds),
            trainable=self.trainable or above.trainable,
            backward=self.backward or above.backward,
            **summed,
        )


@dataclass(frozen=True)
class CostSource:
    """Where the seconds of costs come from: a profile of this machine, or counted FLOPs."""

    profile: str = ""
    """The name of the profile; empty where FLOPs were counted."""
    num_processes: int = 0
    """How many processes were busy while the profile was measured."""
    rate: str = ""
    """The rate by which FLOPs were divided, in words; empty where only ratios matter."""

    @property
    def is_measured(self) -> bool:
        """Whether the seconds are times of this machine."""
        return bool(self.profile)

    def __str__(self) -> str:
        if self.profile:
            return f"profile {self.profile}, {self.num_processes} processes"
        return f"counted FLOPs at {self.rate}" if self.rate else "counted FLOPs"


COUNTED = CostSource()
"""The source of costs whose seconds only compare with one another."""


def effective(units: Sequence[Cost], schedule: str) -> tuple[Cost, ...]:
    """Return the costs of the units, from the embedding up, under a schedule.

    Below the lowest trainable unit no gradient is needed, so there is no backward and nothing is
    kept for one. Under a schedule that halves backwards the gradient goes down to the embedding,
    and no cost changes.
    """
    if schedule in HALVING:
        return tuple(units)
    trainable = (index for index, unit in enumerate(units) if unit.trainable)
    lowest = next(trainable, len(units))
    seconds = {"input_seconds": 0.0, "weight_seconds": 0.0, "split_seconds": 0.0}
    frozen = (replace(u, backward=False, activation_bytes=0, **seconds) for u in units[:lowest])
    return (*frozen, *units[lowest:])
