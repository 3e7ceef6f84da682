"""Splits by the times of a run's steps, on machines that are not what the costs say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.resplit import Proposal, SeenTimes, better_split
from shardwise.base.schedule.split import Limits, Split, predict, split
from tests.schedule.test_split import every_split, model

TWO = Pipeline("1f1b", 2, 8)


def seen_of(truth: Sequence[Cost], pipeline: Pipeline, boundaries: tuple[int, ...]) -> SeenTimes:
    """Return how long each rank works in a step, and the step, on the real machine."""
    timeline = predict(truth, boundaries, pipeline).timeline
    ranks = range(pipeline.num_ranks)
    busy = (timeline.seconds - timeline.idle_seconds(rank) for rank in ranks)
    return SeenTimes(tuple(busy), timeline.seconds)


def followed(
    units: Sequence[Cost],
    truth: Sequence[Cost],
    believed: Pipeline,
    real: Pipeline,
    limit_bytes: Limits = math.inf,
) -> list[tuple[tuple[int, ...], float]]:
    """Return the splits of a run, each with its step, as long as layers move."""
    current: Split = split("balanced", units, believed, limit_bytes)
    seen: dict[tuple[int, ...], SeenTimes] = {}
    steps = []
    while True:
        now = current.boundaries
        seen.pop(now, None)
        seen[now] = seen_of(truth, real, now)
        steps.append((now, seen[now].step_seconds))
        proposal = better_split(units, believed, now, limit_bytes, seen, 1000, 1.0)
        if proposal is None:
            return steps
        current = predict(units, proposal.boundaries, believed)
        if proposal.goes_back:
            return [*steps, (current.boundaries, seen[current.boundaries].step_seconds)]
        assert len(steps) < 10


def best_step(truth: Sequence[Cost], real: Pipeline) -> float:
    splits = every_split(len(truth), real.num_chunks)
    return min(predict(truth, boundaries, real).timeline.seconds for boundaries in splits)


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)])
@pytest.mark.parametrize("speeds", [(1.0, 0.4), (0.3, 1.0), (2.0, 2.0)])
def test_a_slow_rank_gets_what_it_can_do(schedule, v, speeds):
    pipeline = Pipeline(schedule, 2, 8, v)
    units = model(*[1.0] * 12, head=2.0)
    real = replace(pipeline, speeds=speeds)
    steps = followed(units, units, pipeline, real)
    assert steps[-1][1] == pytest.approx(best_step(units, real))
    assert len(steps) == (1 if speeds[0] == speeds[1] else 3)


WRONG = {
    "head": (model(*[1.0] * 12), model(*[1.0] * 12, head=9.0)),
    "lower layers": (model(*[1.0] * 12), model(*[3.0] * 6, *[1.0] * 6)),
    "upper layers": (model(*[1.0] * 12), model(*[1.0] * 6, *[3.0] * 6)),
    "one layer": (model(9.0, *[1.0] * 11), model(*[1.0] * 12)),
    "their unit": (model(*[1.0] * 12), model(*[7.0] * 12)),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_costs_are_found_out(name, num_ranks):
    units, truth = WRONG[name]
    pipeline = Pipeline("1f1b", num_ranks, 8)
    steps = followed(units, truth, pipeline, pipeline)
    best = best_step(truth, pipeline)
    # The best of all splits where there is one boundary; two of them may stop a move before it.
    assert steps[-1][1] <= (1.0 if num_ranks == 2 else 1.11) * best
    assert min(seconds for _, seconds in steps) == steps[-1][1]
    assert (len(steps) == 1) == (name == "their unit")


def proposal(num_steps: int = 1000, cost_seconds: float = 1.0, **ranks: float) -> Proposal | None:
    """Return what six layers on each rank lead to, where the ranks work for so long."""
    now = (0, 7, 14)
    busy = (ranks.get("first", 12.0), ranks.get("second", 12.0))
    seen = {now: SeenTimes(busy, max(busy))}
    return better_split(model(*[1.0] * 12), TWO, now, math.inf, seen, num_steps, cost_seconds)


def test_a_move_has_to_pay():
    found = proposal(second=24.0)
    assert found is not None
    gain = found.seen.step_seconds - found.expected_seconds
    assert gain > 1
    assert proposal(second=24.0, num_steps=10, cost_seconds=9.9 * gain) is not None
    assert proposal(second=24.0, num_steps=10, cost_seconds=10.1 * gain) is None
    assert proposal(second=24.0, num_steps=0, cost_seconds=0.0) is None
    # A seventh layer on the first rank would gain less than what times scatter by.
    assert proposal(second=13.0) is None
    assert proposal(first=0.0, second=0.0) is None


def test_layers_stay_within_the_memory_of_each_rank():
    units = [replace(unit, weight_bytes=10) for unit in model(*[1.0] * 12)]
    real, limits = replace(TWO, speeds=(1.0, 0.2)), (100.0, 1000.0)
    steps = followed(units, units, TWO, real, limits)
    # Eight units and what they keep of two micro-batches: 96 bytes. A ninth would make it 108.
    assert [boundaries for boundaries, _ in steps] == [(0, 7, 14), (0, 8, 14)]
