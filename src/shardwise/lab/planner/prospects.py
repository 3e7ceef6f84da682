"""The divisions and candidates that a search computes first, by estimates of time and memory."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from shardwise.lab.planner.candidates import Candidate, Space
from shardwise.lab.planner.divisions import Division, layout_name, most_sharded
from shardwise.lab.planner.estimate import Estimates
from shardwise.lab.planner.exact import usable_bytes

MOST_GROUPS = 120
"""Groups of divisions that differ in their replicas alone."""
PER_GROUP = 2
"""The fastest divisions of a group that are kept."""
PER_DIVISION = 2
"""The fastest candidates of a division that are computed."""
THRIFTIER = 0.8
"""If none of them fits, the next fastest is computed whose lower bound of memory is below this
share of the least one before it."""


class Prospect(NamedTuple):
    """The candidates of a division that are computed first."""

    fastest: list[Candidate]
    thriftier: list[Candidate]
    """The next ones, each of which needs clearly less memory than those before."""
    smallest: Candidate
    """The one with the lowest bound of memory."""
    seconds: float
    """The estimate of the first."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate: the fastest, the thriftier and the smallest."""
        return (*self.fastest, *self.thriftier, self.smallest)


def promising(
    space: Space, estimates: Estimates, divisions: Sequence[Division], effort: int
) -> list[Prospect]:
    """Return the divisions with the lowest estimates among those that may fit, best first, and one
    of each layout.

    Divisions come in the order of their lower bounds, so that most are never looked into.
    """
    limit, most = usable_bytes(space.question), effort * MOST_GROUPS
    groups: dict[Division, list[Prospect]] = {}
    layouts: dict[str, Prospect] = {}
    last_seconds = math.inf
    for division in divisions:
        layout = layout_name(most_sharded(division))
        if estimates.least_seconds(division) > last_seconds and layout in layouts:
            continue
        if estimates.state_bytes(division, space.offloads[-1]) > limit:
            continue
        prospect = prospect_of(space, estimates, division, effort)
        if prospect is not None:
            layouts.setdefault(layout, prospect)
            group = groups.setdefault(most_sharded(division), [])
            group.append(prospect)
            group.sort(key=lambda prospect: prospect.seconds)
            del group[effort * PER_GROUP :]
            if len(groups) >= most:
                last_seconds = sorted(group[0].seconds for group in groups.values())[most - 1]
    prospects = (prospect for group in groups.values() for prospect in group)
    kept = {prospect.smallest.division: prospect for prospect in layouts.values()}
    kept |= {p.smallest.division: p for p in prospects if p.seconds <= last_seconds}
    return sorted(kept.values(), key=lambda prospect: prospect.seconds)


def prospect_of(
    space: Space, estimates: Estimates, division: Division, effort: int = 1
) -> Prospect | None:
    """Return the candidates of a division that may fit, if there are some."""
    limit = usable_bytes(space.question)
    most_rows = estimates.most_rows(division, space.offloads[-1])
    sizes = {c: estimates.order_of_size(c) for c in space.candidates(division, most_rows)}
    may_fit = [candidate for candidate, (least, *_) in sizes.items() if least <= limit]
    may_fit.sort(key=estimates.seconds)
    in_order = filter(space.is_allowed, may_fit)
    fastest = [*islice(in_order, effort * PER_DIVISION)]
    if not fastest:
        return None
    smallest = next(filter(space.is_allowed, sorted(may_fit, key=sizes.__getitem__)))
    thriftier, least = list[Candidate](), min(sizes[candidate][0] for candidate in fastest)
    for candidate in in_order:
        if sizes[candidate][0] < THRIFTIER * least:
            thriftier.append(candidate)
            least = sizes[candidate][0]
    return Prospect(fastest, thriftier, smallest, estimates.seconds(fastest[0]))
