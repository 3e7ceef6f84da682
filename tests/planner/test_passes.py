"""How far a rank of a pipeline is at its actions: what is left out holds no more than others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shardwise.base.schedule.orders import ORDERS, Pipeline
from shardwise.base.schedule.receives import early_messages
from shardwise.lab.planner.passes import progress_of

PLACES = [
    ("gpipe", 1, 4),
    ("1f1b", 1, 16),
    ("interleaved-1f1b", 2, 8),
    ("looped-bfs", 2, 4),
    ("interleaved-zero-bubble", 2, 8),
    ("zbv", 2, 8),
    ("dualpipe-v", 2, 16),
]


def every_progress(pipeline: Pipeline, rank: int):
    """Yield each action with all that has begun and ended before it, one number after the other."""
    chunks, done = pipeline.chunks_of(rank), Counter[tuple[int, str]]()
    order = zip(pipeline.order(rank), early_messages(pipeline)[rank], strict=True)
    for (chunk, kind, _, _), early in order:
        if chunk == 0:  # torch's first stage runs all of a halved backward in the second half
            kind = {"I": "", "W": "B"}.get(kind, kind)
        if not kind:
            continue
        runs = Counter({(chunk, kind): kind in "BI"})
        numbers = []
        for c in chunks:
            forwards, whole, halves, rests = (done[c, of] for of in "FBIW")
            begun = whole + halves + runs[c, "B"] + runs[c, "I"]
            unfinished = halves - rests
            flags = whole + rests > 0, whole + halves > 0
            waiting = (of_rank[chunks.index(c)] for of_rank in early)
            numbers.append((forwards - begun + unfinished, unfinished, *flags, *waiting, False))
        is_first = not done[chunk, "B"] + done[chunk, "W"]
        yield (kind, chunks.index(chunk), is_first), tuple(zip(*numbers, strict=True))
        done[chunk, kind] += 1


def test_every_schedule_is_looked_at():
    assert {schedule for schedule, *_ in PLACES} == ORDERS.keys()


@pytest.mark.parametrize(("schedule", "each", "number"), PLACES)
def test_the_most_of_any_sum_is_the_most_of_all_actions(schedule, each, number):
    num_ranks = 4
    pipeline = Pipeline(schedule, num_ranks, number, each)
    assert pipeline.shortened() == pipeline
    num_kept = num_different = 0
    for rank in range(num_ranks):
        every: dict[object, list[object]] = {}
        for action, progress in every_progress(pipeline, rank):
            every.setdefault(action, []).append(progress)
        kept = progress_of(pipeline, rank)
        assert [tuple(action) for action in kept] == [*every]
        num_kept += sum(map(len, kept.values()))
        num_different += sum(map(len, map(set, every.values())))
        rng = random.Random(rank)
        for _ in range(20):
            prices = [[rng.random() ** 4 for _ in range(each)] for _ in range(5)]

            def most(of_action, prices=prices) -> float:
                return max(
                    sum(p * n for of, row in zip(prices, one) for p, n in zip(of, row))
                    for one in of_action
                )

            for action, left in kept.items():
                assert most(left) == most(every[tuple(action)])
    assert num_kept < num_different


def test_a_chunk_runs_again_after_a_forward_or_a_backward():
    """1f1b on the first of two ranks: F F B F B F B B."""
    told = progress_of(Pipeline("1f1b", 2, 4), 0, tells_last=True)
    flags = [(tuple(action), {now.after_backward for now in told[action]}) for action in told]
    after, not_after = (True,), (False,)
    assert flags == [
        (("F", 0, True), {not_after}),
        (("B", 0, True), {not_after}),
        (("F", 0, False), {after}),
        (("B", 0, False), {not_after, after}),
    ]
