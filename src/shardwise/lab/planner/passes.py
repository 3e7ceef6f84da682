"""The forwards and backwards of a step on a rank, before it is known what units keep and need."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.receives import early_messages
from shardwise.models.activations import UnitMemory
from shardwise.parallel.holding import Held, HeldUnit, Whole

FORWARD, BACKWARD, INPUTS = map(UnitMemory._fields.index, ("forward", "backward", "inputs"))
"""Fields of UnitMemory: what a unit needs while it runs."""


class Moment(NamedTuple):
    """A moment of a unit's forward or backward."""

    held: Held
    place: int
    """The place of the unit in its chunk."""
    below: int
    """The number of units of the chunk, from the lowest up, whose activations are alive."""
    beside: int
    """Bytes of hidden states and their gradients."""
    kind: int
    """FORWARD, BACKWARD or INPUTS."""


class Pass(NamedTuple):
    """A forward or a backward of a chunk, or one after the other."""

    chunk: int
    moments: tuple[Moment, ...]
    in_flight: tuple[int, ...]
    """The other micro-batches, for each chunk of the rank, that keep its activations."""
    late: int = 0
    """Bytes that halves of backwards have left for the other halves."""
    gradients: int = 0
    """Bytes of other chunks' gradients."""
    messages: int = 0
    """Bytes of hidden states that are received or sent."""


class FirstAction(NamedTuple):
    """An action of a rank of a pipeline, of those that hold the same the first."""

    kind: str
    """F, B, I or W, as in schedule/orders.py."""
    place: int
    """The place of its chunk among those of the rank."""
    is_first: bool
    """The chunk has no gradients yet."""


class PassProgress(NamedTuple):
    """How far a rank of a pipeline is as an action runs: numbers of micro-batches by chunk."""

    in_flight: tuple[int, ...]
    """Forwards whose backward has not begun, or of whose backward half is left."""
    halved: tuple[int, ...]
    """Backwards of which only the first half has ended."""
    has_gradients: tuple[bool, ...]
    has_answered: tuple[bool, ...]
    """Whether a backward, or its first half, has ended."""
    early_inputs: tuple[int, ...]
    """Outputs from below that were received for later forwards, and gradients from above."""
    early_gradients: tuple[int, ...]
    after_backward: tuple[bool, ...]
    """Whether the last action before was a backward; where nobody asks, it is False."""


def forward(units: Sequence[HeldUnit], holding: Whole, hidden: int) -> Iterator[Moment]:
    """Yield the moments of a chunk's forward; `hidden`: the bytes of hidden states."""
    for place in range(len(units)):
        for held in holding.forward(place):
            # What a unit needs does not include its input.
            yield Moment(held, place, place, hidden if place else 0, FORWARD)


def backward(units: Sequence[HeldUnit], holding: Whole, hidden: int) -> Iterator[Moment]:
    """Yield the moments of a chunk's backward."""
    for place, unit in reversed(list(enumerate(units))):
        for held in holding.backward(place):
            yield Moment(held, place, place + 1, _gradient(unit, hidden), BACKWARD)
        for held in holding.reduction(place):
            yield Moment(held, place, place, hidden, BACKWARD)


def backward_of_inputs(units: Sequence[HeldUnit], holding: Whole, hidden: int) -> Iterator[Moment]:
    """Yield the moments of the first half of a backward, which frees nothing.

    A unit leaves what the second half reads.
    """
    late = 0
    for place, unit in reversed(list(enumerate(units))):
        held = holding.between("backward")
        yield Moment(held, place, len(units), _gradient(unit, hidden) + late, INPUTS)
        late += unit.memory.late


def backward_of_weights(units: Sequence[HeldUnit], holding: Whole, hidden: int) -> Iterator[Moment]:
    """Yield the start of the second half of a backward; all that it reads counts as in flight.

    A new gradient is added to the older one.
    """
    largest = 0 if holding.is_first else max(holding.largest)
    yield Moment(holding.between("gradients of weights"), 0, 0, largest, BACKWARD)


PASSES = {"F": forward, "B": backward, "I": backward_of_inputs, "W": backward_of_weights}
"""The moments of an action, by its kind."""


def _gradient(unit: HeldUnit, hidden: int) -> int:
    """Return the bytes of the gradient of a unit's output. The loss's is a number."""
    return 0 if unit.name == "the head" else hidden


@lru_cache(maxsize=1024)
def progress_of(
    pipeline: Pipeline, rank: int, tells_last: bool = False
) -> Mapping[FirstAction, tuple[PassProgress, ...]]:
    """Return how far a rank is at each of its actions, in the order of its schedule.

    Left out is what holds no more than another one of the same action. `tells_last`: whether it is
    asked for `Progress.after_backward`.
    """
    chunks = pipeline.chunks_of(rank)
    number = len(chunks)
    in_flight, halved = [0] * number, [0] * number
    has_gradients, has_answered = [False] * number, [False] * number
    after_backward = [False] * number
    found: dict[FirstAction, dict[PassProgress, None]] = {}
    short = pipeline.shortened()
    order = zip(short.order(rank), early_messages(short)[rank], strict=True)
    for (chunk, kind, _, _), early in order:
        place = chunks.index(chunk)
        if chunk == 0 and kind in "IW":
            # torch's first stage runs all of a halved backward in the second half.
            if kind == "I":
                continue
            kind = "B"
        if kind in "BI":
            in_flight[place] -= 1
        action = FirstAction(kind, place, not has_gradients[place])
        flags = tuple(has_gradients), tuple(has_answered)
        numbers = tuple(in_flight), tuple(halved)
        now = PassProgress(*numbers, *flags, *early, tuple(after_backward))
        found.setdefault(action, {})[now] = None
        after_backward[place] = tells_last and kind != "F"
        if kind == "F":
            in_flight[place] += 1
        if kind in "BI":
            has_answered[place] = True
        if kind in "IW":
            step = 1 if kind == "I" else -1
            in_flight[place] += step
            halved[place] += step
        if kind in "BW":
            has_gradients[place] = True
    return {action: tuple(_largest([*progresses])) for action, progresses in found.items()}


def _largest(progresses: Sequence[PassProgress]) -> Iterator[PassProgress]:
    """Yield those that no other one reaches in every number."""
    numbers = np.array([[number for part in one for number in part] for one in progresses])
    is_within = (numbers[:, None] <= numbers[None]).all(axis=2)  # in itself too
    yield from compress(progresses, is_within.sum(axis=1) == 1)
