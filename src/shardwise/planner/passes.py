"""The forwards and backwards of a step on a rank, before it is known what units keep and need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from shardwise.models.activations import UnitMemory
from shardwise.planner.holding import Held
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import kept_messages

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


class Action(NamedTuple):
    """An action of a rank of a pipeline, of those that hold the same the first."""

    is_forward: bool
    place: int
    """The place of its chunk among those of the rank."""
    is_first: bool
    """The chunk has no gradients yet."""


class Progress(NamedTuple):
    """How far a rank of a pipeline is as an action runs: numbers of micro-batches by chunk."""

    in_flight: tuple[int, ...]
    """Forwards whose backward has not begun, or of whose backward half is left."""
    halved: tuple[int, ...]
    """Backwards of which only the first half has ended."""
    has_gradients: tuple[bool, ...]
    forwards: tuple[int, ...]
    """Forwards and backwards that have ended; where no more is kept the more there are, at most
    one."""
    backwards: tuple[int, ...]
    after_backward: tuple[bool, ...]
    """Whether the last action before was a backward; where nobody asks, it is False."""


@lru_cache(maxsize=1024)
def progress_of(
    pipeline: Pipeline, rank: int, tells_last: bool = False
) -> Mapping[Action, tuple[Progress, ...]]:
    """Return how far a rank is at each of its actions, in the order of its schedule.

    Left out is what holds no more than another one of the same action. In the middle of a long
    step, which repeats itself, only the numbers of messages grow. `tells_last`: whether it is asked
    for `Progress.after_backward`.
    """
    short, chunks = pipeline.shortened(), pipeline.chunks_of(rank)
    left_out = pipeline.num_microbatches - short.num_microbatches
    most = pipeline.num_microbatches if kept_messages(pipeline) else 1
    order, number = short.order(rank), len(chunks)
    in_flight, halved = [0] * number, [0] * number
    has_gradients, ended = [False] * number, {kind: [0] * number for kind in "FB"}
    after_backward = [False] * number
    found: dict[Action, dict[Progress, None]] = {}
    for index, (chunk, kind, _, _) in enumerate(order):
        if index == len(order) // 2:
            for numbers in ended.values():
                numbers[:] = [count + left_out for count in numbers]
        place = chunks.index(chunk)
        if kind in "BI":
            in_flight[place] -= 1
        if kind != "W":
            action = Action(kind == "F", place, not has_gradients[place])
            forwards, backwards = (tuple(min(count, most) for count in ended[of]) for of in "FB")
            flags = tuple(has_gradients), forwards, backwards, tuple(after_backward)
            now = Progress(tuple(in_flight), tuple(halved), *flags)
            found.setdefault(action, {})[now] = None
            after_backward[place] = tells_last and kind in "BI"
        if kind == "F":
            ended["F"][place] += 1
            in_flight[place] += 1
        if kind in "BI":
            ended["B"][place] += 1
        if kind in "IW":
            step = 1 if kind == "I" else -1
            in_flight[place] += step
            halved[place] += step
        if kind in "BW":
            has_gradients[place] = True
    return {action: tuple(_largest([*of_action])) for action, of_action in found.items()}


def _largest(of_action: Sequence[Progress]) -> Iterator[Progress]:
    """Yield those that no other one reaches in every number."""
    numbers = np.array([[number for part in one for number in part] for one in of_action])
    is_within = (numbers[:, None] <= numbers[None]).all(axis=2)  # in itself too
    yield from compress(of_action, is_within.sum(axis=1) == 1)
