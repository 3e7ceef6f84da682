"""Memory that data parallelism holds of gradients and buffers at each moment of a micro-batch.

Each strategy whose gradients are not simply whole has a class of its own in its file. None knows
anything of activations, which the planner adds. Where a file says "copy", gloo copies what a
collective gathers or scatters, and NCCL does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardwise.base.layouts import strategy_facts
from shardwise.config import RunConfig
from shardwise.parallel.weights import Weight, gradient_bytes

if TYPE_CHECKING:
    from shardwise.models.activations import UnitMemory


@dataclass(frozen=True)
class HeldUnit:
    """The embedding, a layer, or final norm and head, as a rank holds it."""

    name: str
    memory: UnitMemory
    weights: tuple[Weight, ...]

    @cached_property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


class ChunkUnits(NamedTuple):
    """The units of a chunk, and how a rank holds them."""

    cfg: RunConfig
    units: Sequence[HeldUnit]
    num_shards: int
    is_gloo: bool
    tied: Weight | None
    """The weight that both ends of the chunk use."""


class Held(NamedTuple):
    """The bytes that a strategy holds at a moment of a unit."""

    moment: str
    gradients: int
    buffers: int = 0
    runs: bool = True
    """Whether the unit computes at that moment, or its weights or gradients are on their way."""


class Whole:
    """Every rank holds complete gradients: one process, zero1, and what is not sharded over data.

    The first micro-batch leaves its gradients. Those of a later one are added to them, one weight
    after the other.
    """

    repeats = False
    """Whether every micro-batch after the first one is like the second."""

    def __init__(self, units: ChunkUnits) -> None:
        self.cfg, self.units, self.num_shards, self.is_gloo, self.tied = units
        sizes = [{weight: self._gradient(weight) for weight in unit.trained} for unit in self.units]
        self.gradients = [sum(unit_sizes.values()) for unit_sizes in sizes]
        # The head makes a gradient of a tied weight, to which the embedding adds its own at last.
        self.early = sizes[0].pop(self.tied, 0) if self.tied else 0
        self.largest = [max(unit_sizes.values(), default=0) for unit_sizes in sizes]
        is_kept = self.cfg.training.loss != "plain" and self.units[-1].name == "the head"
        if is_kept and all(weight.itemsize == 4 for weight in self.units[-1].trained):
            self.largest[-1] = 0  # Among what the loss keeps is the gradient of its weight.
        if self.cfg.training.casts_weights and not strategy_facts(self.cfg.parallel).gathers_copies:
            self.largest = [0] * len(self.units)  # They come from those of copies, at a unit's end.
        self.total = self.reduced = sum(self.gradients)
        """The bytes of gradients before and after `last_reduction`."""
        self.is_first = self.is_last = True
        self.is_gathered = False
        """Whether the weights of all units are there as an action of a pipeline begins."""

    @property
    def gathered_bytes(self) -> int:
        """The bytes of gathered weights between actions of a pipeline, if they are there."""
        return 0

    def _gradient(self, weight: Weight) -> int:
        return gradient_bytes(self.cfg, weight.numel, weight.itemsize)

    def _sent(self, weights: Iterable[Weight]) -> int:
        """Return the bytes that are reduce-scattered for the gradients of these weights."""
        return sum(4 * weight.padded_numel for weight in weights if weight.is_trained)

    def _summed(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of a rank's part of their sums, in float32: 1/n of what is sent."""
        return sum(4 * w.padded_numel // w.num_shards for w in weights if w.is_trained)

    def begin(self, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch: whether it is the first or the last one of a step."""
        self.is_first, self.is_last = is_first, is_last

    def forward(self, place: int) -> Iterator[Held]:
        """Yield what is held before and while a unit runs forward."""
        yield Held("forward", 0 if self.is_first else self.total)

    def backward(self, place: int) -> Iterator[Held]:
        """Yield what is held before and while a unit runs backward.

        Of its new gradients, those that are added to older ones are part of what the unit needs.
        New ones stay. While activations are large, in the first products of the backward, one of
        them is there.
        """
        if self.is_first:
            new = sum(self.gradients[place + 1 :]) + self.largest[place]
            yield Held("backward", new + self.early)
        else:
            yield Held("backward", self.total + self.early)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield what is held after the backward of a unit, while its gradients are reduced."""
        gradients = sum(self.gradients[place:]) if self.is_first else self.total
        yield Held("end", gradients + (self.early if place else 0), runs=False)

    def last_reduction(self) -> Iterator[Held]:
        """Yield what is held after the last backward of a step."""
        yield from ()

    def between(self, moment: str) -> Held:
        """Return what is held in a half of a backward: no new gradient, all weights."""
        gradients = 0 if self.is_first else self.total
        return Held(moment, gradients, self.gathered_bytes, runs=moment == "backward")
