"""The forwards and backwards of a step on a rank, before it is known what units keep and need."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from shardwise.models.activations import UnitMemory
from shardwise.planner.holding import Held

FORWARD, BACKWARD = UnitMemory._fields.index("forward"), UnitMemory._fields.index("backward")


class Moment(NamedTuple):
    """A moment of a unit's forward or backward."""

    held: Held
    place: int
    """Of the unit in its chunk."""
    below: int
    """Of how many units of the chunk, from the lowest up, activations are alive."""
    beside: int
    """Bytes of hidden states and their gradients."""
    kind: int
    """FORWARD or BACKWARD: the field of UnitMemory that the unit needs while it runs."""


class Pass(NamedTuple):
    """A forward or a backward of a chunk, or one after the other."""

    chunk: int
    moments: tuple[Moment, ...]
    in_flight: tuple[int, ...]
    """Of each chunk of the rank, the other micro-batches that keep its activations."""
    late: int = 0
    """Bytes that halves of backwards have left for the other halves."""
    gradients: int = 0
    """Bytes of other chunks' gradients."""
    messages: int = 0
    """Bytes of hidden states that are received or sent."""


class Progress:
    """How far a rank of a pipeline is in its step: numbers of micro-batches by chunk."""

    def __init__(self) -> None:
        self.forwards, self.backwards = Counter[int](), Counter[int]()
        """Forwards and backwards that have ended."""
        self.in_flight = Counter[int]()
        """Forwards whose backward has not begun."""
        self.halved = Counter[int]()
        """Backwards of which only the first half has ended."""

    def begin(self, kind: str, chunk: int) -> None:
        """Count an action that begins: a backward takes its micro-batch out of flight."""
        if kind in "BI":
            self.in_flight[chunk] -= 1

    def end(self, kind: str, chunk: int) -> None:
        """Count an action that has ended. After half of a backward its micro-batch is in flight."""
        if kind == "F":
            self.forwards[chunk] += 1
            self.in_flight[chunk] += 1
        if kind in "BI":
            self.backwards[chunk] += 1
        if kind in "IW":
            step = 1 if kind == "I" else -1
            self.in_flight[chunk] += step
            self.halved[chunk] += step
