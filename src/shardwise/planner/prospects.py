"""The divisions and candidates that a search computes first, by estimates of time and memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from shardwise.planner.candidates import Candidate, Space
from shardwise.planner.divisions import Division
from shardwise.planner.estimate import Estimates
from shardwise.planner.exact import usable_bytes

MOST_DIVISIONS = 200
PER_DIVISION = 2
"""The fastest candidates of a division that are computed, beside its smallest."""


class Prospect(NamedTuple):
    """The candidates of a division that are computed first."""

    fastest: list[Candidate]
    smallest: Candidate
    """The one with the lowest bound of memory."""
    seconds: float
    """The estimate of the first."""


def promising(
    space: Space, estimates: Estimates, divisions: Sequence[Division], effort: int
) -> list[Prospect]:
    """Return the divisions with the lowest estimates among those that may fit, best first.

    Divisions come in the order of their lower bounds, so that most are never looked into.
    """
    most = effort * MOST_DIVISIONS
    limit = usable_bytes(space.question)
    best: list[tuple[float, int, Prospect]] = []
    for number, division in enumerate(divisions):
        if len(best) == most and estimates.least_seconds(division) > -best[0][0]:
            break
        if estimates.state_bytes(division, space.offloads[-1]) > limit:
            continue
        prospect = prospect_of(space, estimates, division, effort)
        if prospect is not None:
            entry = (-prospect.seconds, number, prospect)
            push = heapq.heappush if len(best) < most else heapq.heappushpop
            push(best, entry)
    return [prospect for _, _, prospect in sorted(best, reverse=True)]


def prospect_of(
    space: Space, estimates: Estimates, division: Division, effort: int = 1
) -> Prospect | None:
    """Return the candidates of a division that may fit, if there are some."""
    limit = usable_bytes(space.question)
    sizes = {c: estimates.order_of_size(c) for c in space.candidates(division)}
    may_fit = [candidate for candidate, (least, *_) in sizes.items() if least <= limit]
    may_fit.sort(key=estimates.seconds)
    fastest = [*islice(filter(space.is_allowed, may_fit), effort * PER_DIVISION)]
    if not fastest:
        return None
    smallest = next(filter(space.is_allowed, sorted(may_fit, key=sizes.__getitem__)))
    return Prospect(fastest, smallest, estimates.seconds(fastest[0]))
