"""Where the slots stop to read their own shares, so that all steps but the last one are full."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.config import UserError
from shardwise.data.files import tell
from shardwise.data.formats import LEFT_OVER
from shardwise.data.slots import Mark, Marks, TrainStream, items
from shardwise.data.state import Rest

Gather = Callable[[Any], list[Any]]
"""Returns what each rank gives, to all of them."""


def deal(stream: TrainStream, num_workers: int, gather: Gather) -> Rest:
    """Return how a run ends whose slots go on where `stream` begins, a collective of all ranks.

    A rank's stream has a share of the slots. Each slot reads its own rows up to the mean of all
    slots, or until its last, poorly filled rows; the rest belongs to all. It is packed once to be
    counted, by the rank with slot 0. Slots stop earlier if it comes to fewer rows than a full step
    before the last one needs, or to none: its last row counts what is left out at the end.
    """
    order, size = stream.order, stream.global_batch_size
    assert order.epochs is not None
    tell(f"reading the documents of training.epochs {order.epochs:g} once, to count the steps")
    marks = _marks(stream, dict.fromkeys(stream.begin), num_workers)
    left_over = LEFT_OVER[stream.encoder.data.packed]
    mine = {slot: max(found[-1][0] - left_over, 0) for slot, found in marks.items()}
    num_rows = dict(ChainMap(*gather(mine)))
    most = sum(num_rows.values()) // size
    while True:
        wanted = {slot: min(num_rows[slot], most) for slot in range(size)}
        begin = ChainMap(*gather(_behind(stream, marks, wanted, num_workers)))
        last_own = tuple(stream.step + wanted[slot] for slot in range(size))
        rest = Rest(order.epochs, last_own, tuple(begin[slot] for slot in range(size)), 0)
        counted = replace(stream, rest=rest).num_rest_rows() if 0 in stream.begin else 0
        rest = replace(rest, num_rows=max(gather(counted)))
        num_steps = rest.num_steps - stream.step
        is_full = most < num_steps or sum(last_own) + rest.num_rows == rest.num_steps * size
        if most == 0 or (is_full and most <= num_steps and rest.num_rows):
            return rest
        most = min(most, num_steps) - 1


def _behind(
    stream: TrainStream, marks: Mapping[int, list[Mark]], wanted: Mapping[int, int], workers: int
) -> dict[int, Any]:
    """Return the state of each slot behind so many of its rows, read from the mark before them."""
    nearest = {
        slot: next(mark for mark in reversed(found) if mark[0] <= wanted[slot])
        for slot, found in marks.items()
    }
    begin = {slot: state for slot, (_, state) in nearest.items()}
    left = {slot: wanted[slot] - number for slot, (number, _) in nearest.items()}
    more = {slot: number for slot, number in left.items() if number}
    found = _marks(replace(stream, begin=begin), more, workers)
    return begin | {slot: marks[-1][1] for slot, marks in found.items()}


def _marks(
    stream: TrainStream, num_rows: Mapping[int, int | None], num_workers: int
) -> dict[int, list[Mark]]:
    found = {}
    num_workers = min(num_workers, len(num_rows))
    for item in items(Marks(stream, num_rows), stream.encoder, num_workers):
        if isinstance(item, UserError):
            raise item
        slot, marks = item
        found[slot] = marks
    return found
