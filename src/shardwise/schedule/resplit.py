"""Whether layers should move between the ranks of a running pipeline, by the times of its steps.

A rank whose work takes f times what the costs of its units predict counts as one of speed 1/f,
whether its device is slow or its layers cost more than was thought, and the model is cut again for
ranks of these speeds. A wrong guess shows in the next steps: a split that has run is judged by the
time that it took, so that a run never goes back to a slower one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.config import UserError
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Limits, Split, predict, split

LEAST_GAIN = 0.05
"""The share of a step that a move must be expected to gain, above what times scatter by."""


@dataclass(frozen=True)
class Proposal:
    """Another split, and why."""

    layers: tuple[int, ...]
    """The number of layers in each chunk."""
    boundaries: tuple[int, ...]
    speeds: tuple[float, ...]
    """Of each rank, in the seconds of the units' costs over those of the step."""
    busy_seconds: tuple[float, ...]
    """The work of each rank in a step, without waiting."""
    step_seconds: float
    expected_seconds: float
    """The step under the new split."""

    @property
    def relative_speeds(self) -> list[float]:
        """The speeds as `parallel.speeds` has them: over that of the fastest rank."""
        return [speed / max(self.speeds) for speed in self.speeds]


def speeds_of(
    units: Sequence[Cost],
    boundaries: tuple[int, ...],
    pipeline: Pipeline,
    busy_seconds: Sequence[float],
) -> tuple[float, ...]:
    """Return the speeds of ranks that were busy for so long in a step.

    A rank of which nothing is known, since no cost is predicted there, is as fast as the median.
    """
    timeline = predict(units, boundaries, replace(pipeline, speeds=())).timeline
    predicted = [timeline.seconds - timeline.idle_seconds(r) for r in range(pipeline.num_ranks)]
    pairs = list(zip(predicted, busy_seconds, strict=True))
    known = [cost / busy for cost, busy in pairs if cost > 0 and busy > 0]
    median = statistics.median(known) if known else 1.0
    return tuple(cost / busy if cost > 0 and busy > 0 else median for cost, busy in pairs)


def better_split(
    units: Sequence[Cost],
    pipeline: Pipeline,
    current: Split,
    limit_bytes: Limits,
    busy_seconds: Sequence[float],
    seen: Mapping[tuple[int, ...], float],
    num_steps: int,
    cost_seconds: float,
) -> Proposal | None:
    """Return a split that gains more in `num_steps` steps than the move costs; None without one.

    `busy_seconds`: the work of each rank in a step. `seen`: what a step took under the splits that
    have run, the current one among them, by their boundaries.
    """
    now = current.boundaries
    speeds = speeds_of(units, now, pipeline, busy_seconds)
    pipeline = replace(pipeline, speeds=speeds)
    try:
        best = split("balanced", units, pipeline, limit_bytes)
    except UserError:  # a search, which the current split did not come out of, finds none that fits
        return None
    simulated = predict(units, now, pipeline).timeline.seconds
    if best.boundaries == now or not simulated:
        return None
    expected = seen.get(best.boundaries, seen[now] * best.timeline.seconds / simulated)
    gain = seen[now] - expected
    if gain < LEAST_GAIN * seen[now] or not math.isfinite(gain) or gain * num_steps <= cost_seconds:
        return None
    return Proposal(best.layers, best.boundaries, speeds, tuple(busy_seconds), seen[now], expected)
