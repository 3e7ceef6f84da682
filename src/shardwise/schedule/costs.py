"""What one micro-batch costs in a piece of a model: the numbers that the simulator and the splits work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from shardwise.layouts import HALVING


@dataclass(frozen=True)
class Cost:
    """What one micro-batch costs in one unit (the embedding, a decoder layer, or head and loss) or in several.

    Seconds may be FLOPs divided by a rate, where nothing could be measured. `+` joins neighbours into a chunk.
    """

    name: str
    forward_seconds: float
    input_seconds: float
    """Backward: the gradient of the unit's input, and of whatever lies between."""
    weight_seconds: float
    """Backward: the gradients of its trainable weights; a frozen weight has none."""
    activation_bytes: int
    """What the forward leaves for the backward, the unit's input included."""
    output_bytes: int
    """What the next unit is sent; a gradient of the same size comes back."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    parameters: int = 0
    trainable: bool = True
    """Some parameter in it is trained."""
    split_seconds: float = 0.0
    """What the backward takes longer where its two halves run apart."""
    backward: bool = True
    """The backward comes through it."""
    stage_seconds: float = 0.0
    """What a stage's forward takes around its units, however many they are; not in `forward_seconds`."""
    output_seconds: float = 0.0
    """What it takes to send `output_bytes`, where that was measured."""

    @property
    def backward_seconds(self) -> float:
        """The backward in one go."""
        return self.input_seconds + self.weight_seconds

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def state_bytes(self) -> int:
        """What it holds all the time: weights, gradients and optimizer."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, above: Cost) -> Cost:
        """Join it and the unit `above` it: sums, but what is sent on is what `above` sends."""
        summed = {
            f.name: getattr(self, f.name) + getattr(above, f.name)
            for f in fields(Cost)
            if f.name not in ("name", "output_bytes", "output_seconds", "stage_seconds", "trainable", "backward")
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


def effective(units: Sequence[Cost], schedule: str) -> tuple[Cost, ...]:
    """What the units, from the embedding up, cost under this schedule.

    Below the lowest trainable unit no gradient is needed, so there is no backward, and nothing is kept for one. Under a
    schedule that halves backwards the gradient goes down to the embedding, and every unit costs what it says.
    """
    if schedule in HALVING:
        return tuple(units)
    lowest = next((index for index, unit in enumerate(units) if unit.trainable), len(units))
    nothing = {"input_seconds": 0.0, "weight_seconds": 0.0, "split_seconds": 0.0, "activation_bytes": 0}
    return (*(replace(unit, backward=False, **nothing) for unit in units[:lowest]), *units[lowest:])
