"""Messages that arrive before they are read, against where torch lists receives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardwise.base.schedule.orders import ORDERS, Pipeline
from shardwise.base.schedule.receives import Early, early_messages
from shardwise.base.schedules import ONE_STAGE
from tests.schedule.test_orders import CLASSES, VIRTUAL, Stage

SIZES = [(p, m) for p in (2, 3, 4, 6) for m in (8, 12, 18)]


def from_torch(pipeline: Pipeline) -> list[list[Early]]:
    stages = [Stage(chunk, 0, pipeline) for chunk in pipeline.chunks_of(0)]
    schedule = CLASSES[pipeline.schedule](stages, pipeline.num_microbatches)
    lists = schedule.pipeline_order_with_comms
    return [_early(pipeline.chunks_of(rank), lists[rank]) for rank in range(pipeline.num_ranks)]


def _early(chunks: tuple[int, ...], listed: list[Any]) -> list[Early]:
    received = set()
    found = []
    for listed_action in listed:
        for action in listed_action.sub_actions or (listed_action,):
            chunk, number = action.stage_index, action.microbatch_index
            kind = action.computation_type.value
            if kind.startswith("RECV"):
                received.add((kind[-1], chunk, number))
            elif kind in "FBIW":
                # Until its second half the first stage keeps what its first half is given.
                if (chunk, kind) != (0, "I"):
                    received.discard(("F" if kind == "F" else "B", chunk, number))
                waiting = Counter((way, chunk) for way, chunk, _ in received)
                early = (tuple(waiting[way, chunk] for chunk in chunks) for way in "FB")
                found.append((next(early), next(early)))
    return found


@pytest.mark.parametrize("schedule", [name for name in ORDERS if name not in ONE_STAGE])
def test_messages_are_as_early_as_torch_lists_them(schedule):
    """Except near the end of a step: torch's lists also have actions that reduce gradients."""
    num_off, num_actions = 0, 0
    for p, m in SIZES:
        for v in VIRTUAL.get(schedule, [1, 2, 3]):
            try:
                pipeline = Pipeline(schedule, p, m, v)
            except AssertionError:  # it takes no such number of micro-batches
                continue
            for ours, torchs in zip(early_messages(pipeline), from_torch(pipeline), strict=True):
                pairs = [*zip(map(total, ours), map(total, torchs), strict=True)]
                num_off += sum(mine != other for mine, other in pairs)
                num_actions += len(pairs)
                most, most_of_torch = map(max, zip(*pairs, strict=True))
                assert -2 <= most - most_of_torch <= 0, (pipeline, ours, torchs)
    assert num_off < 0.015 * num_actions > 30


def total(early: Early) -> int:
    return sum(map(sum, early))


def test_a_rank_of_one_stage_receives_what_it_runs_next():
    for schedule in ONE_STAGE:
        pipeline = Pipeline(schedule, 4, 8)
        assert {early for rank in early_messages(pipeline) for early in rank} == {((0,), (0,))}
