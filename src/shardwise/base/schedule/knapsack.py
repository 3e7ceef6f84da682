"""Which layers to compute again, so that a rank's memory stays within bounds at the least price.

The layers of a chunk run upwards in the forward and downwards in the backward. So what is alive
beside a layer is what those below it keep, and the bytes that a layer may need depend on its place.
This is a multiple-choice knapsack (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004,
chapter 11) with a bound at each item, solved by dynamic programming over the items: of the ways to
choose for the lowest layers, only those remain that no other one beats in bytes and price.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

MOST_STATES = 4096
"""Ways to choose for the lowest layers that are kept in mind. More are thinned out evenly, which
keeps every result valid, but perhaps not the cheapest one."""
MOST_TOTALS = 100
"""Totals of kept bytes that are tried for a rank's chunks with other micro-batches in flight."""


class Option(NamedTuple):
    """One way to run a unit."""

    kept: int
    """Bytes alive from its forward to its backward."""
    forward: int
    """The most bytes in its forward, beside those."""
    backward: int
    """The most bytes in its backward, beside what is alive at its start."""
    price: int = 0


@dataclass(frozen=True)
class Bounds:
    """The bytes of activations that a chunk may have, by place."""

    forward: Sequence[int]
    """While each unit runs forward: what those below keep, and what it needs."""
    backward: Sequence[int]
    """While each unit runs backward: what those below and it keep, and what it needs."""
    kept: Sequence[int]
    """Bytes that the lowest units keep: none of them, the first, the first two and so on to all."""


Choice = tuple[int, ...]
"""The number of an option for each unit."""


def cheapest(units: Sequence[Sequence[Option]], bounds: Bounds) -> Choice | None:
    """Return the cheapest options within the bounds; of equal prices, those that keep least.

    None where nothing is within them.
    """
    if bounds.kept[0] < 0:
        return None
    # (kept, price, option of the highest unit, the state below), by kept bytes; prices fall.
    states: list[tuple[int, int, int, Any]] = [(0, 0, -1, None)]
    for place, options in enumerate(units):
        grown = []
        for number, (kept, forward, backward, price) in enumerate(options):
            least = max(
                forward - bounds.forward[place],
                kept + backward - bounds.backward[place],
                kept - bounds.kept[place + 1],
            )
            grown += [(s[0] + kept, s[1] + price, number, s) for s in states if s[0] + least <= 0]
        states = _thinned(_undominated(grown))
        if not states:
            return None
    chosen, state = [], states[-1]
    while state[3] is not None:
        chosen.append(state[2])
        state = state[3]
    return tuple(reversed(chosen))


def _undominated(states: list[Any]) -> list[Any]:
    states.sort(key=itemgetter(0, 1, 2))
    left: list[Any] = []
    for state in states:
        if not left or state[1] < left[-1][1]:
            left.append(state)
    return left


def _thinned(states: list[Any], most: int = 0) -> list[Any]:
    """Return so many values, evenly spaced, the first and the last among them."""
    most, last = most or MOST_STATES, len(states) - 1
    if last < most:
        return states
    return [states[place * last // (most - 1)] for place in range(most)]


def _totals_of(units: Sequence[Sequence[Option]], most: int) -> list[int]:
    """Return totals of kept bytes that the units may have: all of them, or so many."""
    totals = [0]
    for options in units:
        totals = _thinned(sorted({x + option.kept for x in totals for option in options}))
    return _thinned(totals, most)


@dataclass(frozen=True)
class ChunkOptions:
    """Units that run one after the other, and the bounds that other chunks' bytes lower."""

    units: Sequence[Sequence[Option]]
    bounds: Sequence[tuple[tuple[int, ...], Bounds]]
    """Passes of the chunk: the micro-batches in flight of each chunk of the rank, which keep
    as much as the chunk does, and the bounds of what they leave."""


def choose(chunks: Sequence[ChunkOptions]) -> tuple[Choice, ...] | None:
    """Return the cheapest choice for the chunks of a rank; None where nothing is within bounds.

    What other micro-batches keep is set first, to each of the totals that the chunks may have. If
    these are few, or no others are in flight, the choice is the cheapest one; else there may be a
    cheaper one between two totals.
    """
    chunks = [ChunkOptions(chunk.units, [*_joined(chunk.bounds)]) for chunk in chunks]
    totals: Iterable[Sequence[int] | None] = [None]
    if any(any(numbers) for chunk in chunks for numbers, _ in chunk.bounds):
        most = max(2, int(MOST_TOTALS ** (1 / len(chunks))))
        totals = product(*(_totals_of(chunk.units, most) for chunk in chunks))
    found = [_with_totals(chunks, one) for one in totals]
    priced = [one for one in found if one is not None]
    return min(priced, key=lambda one: one[0])[1] if priced else None


def _joined(
    bounds: Iterable[tuple[tuple[int, ...], Bounds]],
) -> Iterator[tuple[tuple[int, ...], Bounds]]:
    """Yield the lowest bounds of the passes with as many micro-batches in flight."""
    alike: dict[tuple[int, ...], list[Bounds]] = {}
    for numbers, one in bounds:
        alike.setdefault(numbers, []).append(one)
    for numbers, ones in alike.items():
        parts = ((one.forward, one.backward, one.kept) for one in ones)
        yield numbers, Bounds(*([*map(min, zip(*part))] for part in zip(*parts)))


def _with_totals(
    chunks: Sequence[ChunkOptions], totals: Sequence[int] | None
) -> tuple[int, tuple[Choice, ...]] | None:
    price, choices = 0, []
    for place, chunk in enumerate(chunks):
        choice = cheapest(chunk.units, _lowest(chunk, totals, place))
        if choice is None:
            return None
        choices.append(choice)
        price += sum(unit[n].price for unit, n in zip(chunk.units, choice, strict=True))
    return price, tuple(choices)


def _lowest(chunk: ChunkOptions, totals: Sequence[int] | None, place: int) -> Bounds:
    """Return the lowest bounds of a chunk in its passes, if each chunk keeps these totals."""
    less = [
        sum(number * total for number, total in zip(numbers, totals or (), strict=False))
        for numbers, _ in chunk.bounds
    ]

    def lowest(name: str) -> list[int]:
        pass_bounds = (getattr(bounds, name) for _, bounds in chunk.bounds)
        lowered = [[x - taken for x in one_pass] for one_pass, taken in zip(pass_bounds, less)]
        return [min(values) for values in zip(*lowered, strict=True)]

    kept = lowest("kept")
    if totals is not None:
        kept[-1] = min(kept[-1], totals[place])
    return Bounds(lowest("forward"), lowest("backward"), kept)
