"""Whether layers should move between the ranks of a running pipeline, by the times of its steps.

A rank whose work takes f times what was predicted may have a device that is f times slower, or
layers that cost f times as much. A step does not say which. So the first move is one that is good
either way, and later ones go by what predicted the work of the ranks after the last move better.
After a move that made steps longer, layers go back, and stay.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import Limits, Split, predict, split
from shardwise.config import UserError

LEAST_GAIN = 0.05
"""The share of a step that a move must be expected to gain, above what times scatter by."""
_SECONDS = (
    *("forward_seconds", "input_seconds", "weight_seconds"),
    *("split_seconds", "stage_seconds"),
)


@dataclass(frozen=True)
class SeenTimes:
    """Times of a step under a split."""

    busy_seconds: tuple[float, ...]
    """The work of each rank, without waiting."""
    step_seconds: float


@dataclass(frozen=True)
class Proposal:
    """Another split, and why."""

    layers: tuple[int, ...]
    """The number of layers in each chunk."""
    boundaries: tuple[int, ...]
    seen: SeenTimes
    """The step under the current split."""
    expected_seconds: float
    """The step under this one."""
    goes_back: bool = False
    """Whether this one has run, and was faster."""


Explanation = tuple[Sequence[Cost], Pipeline]
"""The units and ranks that a step would be of."""


def better_split(
    units: Sequence[Cost],
    pipeline: Pipeline,
    now: tuple[int, ...],
    limit_bytes: Limits,
    seen: Mapping[tuple[int, ...], SeenTimes],
    num_steps: int,
    cost_seconds: float,
) -> Proposal | None:
    """Return a split that gains more in `num_steps` steps than the move costs; None without one.

    `now`: the boundaries of the current split. `seen`: the steps of the splits that have run, by
    their boundaries, in the order of their latest steps; the current one is the last.
    """

    def pays(expected_seconds: float) -> bool:
        gain = seen[now].step_seconds - expected_seconds
        return gain >= LEAST_GAIN * seen[now].step_seconds and gain * num_steps > cost_seconds

    fastest = min(seen, key=lambda boundaries: seen[boundaries].step_seconds)
    if pays(seconds := seen[fastest].step_seconds):
        layers = predict(units, fastest, pipeline).layers
        return Proposal(layers, fastest, seen[now], seconds, goes_back=True)
    explanations = list(_likely(units, pipeline, seen))
    before = [predict(*_cut(e, now)).timeline.seconds for e in explanations]
    found: list[tuple[float, Split]] = []
    for candidate in {*_candidates(explanations, now, limit_bytes)} - seen.keys():
        after = [predict(*_cut(e, candidate)) for e in explanations]
        limits = np.broadcast_to(limit_bytes, pipeline.num_ranks)
        if (np.array(after[0].memory_bytes) <= limits).all() and min(before) > 0:
            ratio = max(cut.timeline.seconds / b for cut, b in zip(after, before, strict=True))
            found.append((seen[now].step_seconds * ratio, after[0]))
    found.sort(key=lambda pair: (pair[0], pair[1].boundaries))
    if not found or not pays(found[0][0]):
        return None
    expected, best = found[0]
    return Proposal(best.layers, best.boundaries, seen[now], expected)


def _cut(
    explanation: Explanation, boundaries: tuple[int, ...]
) -> tuple[Sequence[Cost], tuple[int, ...], Pipeline]:
    return explanation[0], boundaries, explanation[1]


def _likely(
    units: Sequence[Cost], pipeline: Pipeline, seen: Mapping[tuple[int, ...], SeenTimes]
) -> Iterator[Explanation]:
    """Yield both explanations of the last split's steps, or the one that foresaw them better."""
    *others, now = seen
    both = explanations_of(units, pipeline, now, seen[now].busy_seconds)
    if not others:
        yield from both
        return
    earlier = explanations_of(units, pipeline, others[-1], seen[others[-1]].busy_seconds)
    errors = []
    for explanation in earlier:
        foreseen = _busy(*_cut(explanation, now))
        pairs = zip(foreseen, seen[now].busy_seconds, strict=True)
        errors.append(sum(abs(math.log(a / b)) for a, b in pairs if a > 0 and b > 0))
    yield both[errors.index(min(errors))]


def explanations_of(
    units: Sequence[Cost],
    pipeline: Pipeline,
    boundaries: tuple[int, ...],
    busy_seconds: Sequence[float],
) -> tuple[Explanation, Explanation]:
    """Return ranks of other speeds, and units of other costs, whose ranks work for so long.

    A rank of which nothing is known, since no cost is predicted there, is taken for the median.
    """
    pairs = list(zip(busy_seconds, _busy(units, boundaries, pipeline), strict=True))
    known = [busy / foreseen for busy, foreseen in pairs if busy > 0 and foreseen > 0]
    median = statistics.median(known) if known else 1.0
    slower = [busy / cost if busy > 0 and cost > 0 else median for busy, cost in pairs]
    base = pipeline.speeds or (1.0,) * pipeline.num_ranks
    speeds = tuple(speed / factor for speed, factor in zip(base, slower, strict=True))
    scaled = [
        replace(unit, **{name: getattr(unit, name) * factor for name in _SECONDS})
        for chunk, (low, high) in enumerate(pairwise(boundaries))
        for factor in [slower[pipeline.rank_of(chunk)]]
        for unit in units[low:high]
    ]
    return (units, replace(pipeline, speeds=speeds)), (scaled, pipeline)


def _busy(units: Sequence[Cost], boundaries: tuple[int, ...], pipeline: Pipeline) -> list[float]:
    timeline = predict(units, boundaries, pipeline).timeline
    return [timeline.seconds - timeline.idle_seconds(r) for r in range(pipeline.num_ranks)]


def _candidates(
    explanations: Sequence[Explanation], now: tuple[int, ...], limit_bytes: Limits
) -> Iterator[tuple[int, ...]]:
    """Yield the best split by each explanation, and those on the way to it."""
    for units, pipeline in explanations:
        try:
            best = split("balanced", units, pipeline, limit_bytes).boundaries
        except UserError:  # the search need not find the current one, which fits
            continue
        for share in (0.25, 0.5, 0.75, 1.0):
            edges = [round(old + share * (new - old)) for old, new in zip(now, best, strict=True)]
            if all(low < high for low, high in pairwise(edges)):
                yield tuple(edges)
