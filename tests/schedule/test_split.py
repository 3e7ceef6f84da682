"""Splits against brute force on small models, and against bounds worked out by hand."""

from __future__ import annotations

import math
import random
import re
import time
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.base.schedule.costs import Cost, effective
from shardwise.base.schedule.orders import ORDERS, Pipeline
from shardwise.base.schedule.simulate import Work, times
from shardwise.base.schedule.split import (
    Split,
    bottleneck,
    bound_seconds,
    predict,
    scores,
    search,
    split,
)
from shardwise.config import UserError

MIB = 2**20
CASES = [  # schedule, ranks, chunks per rank
    ("gpipe", 3, 1),
    ("1f1b", 3, 1),
    ("interleaved-1f1b", 2, 2),
    ("looped-bfs", 2, 2),
    ("interleaved-zero-bubble", 2, 2),
    ("zbv", 2, 2),
    ("dualpipe-v", 2, 2),
]


def unit(seconds: float, **more: object) -> Cost:
    """A frozen layer with adapters: as much backward as forward, and no weight gradients."""
    return Cost("unit", seconds, seconds, 0.0, **{"activation_bytes": 1, "output_bytes": 1, **more})


def model(*layers: float, head: float = 0.0) -> list[Cost]:
    return [unit(0.0), *map(unit, layers), unit(head)]


def every_split(num_units: int, num_chunks: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, num_units) for cuts in combinations(range(1, num_units), num_chunks - 1)]


def random_model(draw: random.Random, layers: int) -> list[Cost]:
    return [
        Cost(
            str(i),
            float(draw.randint(1, 9)),
            float(draw.randint(0, 9)),
            float(draw.randint(0, 5)),
            activation_bytes=draw.randint(0, 9) * MIB,
            output_bytes=draw.randint(1, 9) * MIB,
            weight_bytes=draw.randint(0, 30) * MIB,
            parameters=draw.randint(1, 9),
            trainable=draw.random() < 0.5,
        )
        for i in range(layers + 2)
    ]


def named_limit(error: UserError) -> float:
    """Return the limit that the error proposes, in GiB."""
    return float(
        str(error).partition("set parallel.memory_limit_gib to ")[2].removesuffix(" or more")
    )


def test_the_contents_of_a_chunk_in_words():
    pipeline = Pipeline("gpipe", 4, 4)
    cut = predict(model(1.0, 1.0, 1.0, 1.0, 1.0), (0, 1, 2, 5, 7), pipeline)
    assert [cut.contents(chunk) for chunk in range(4)] == [
        ["embedding"],
        ["0"],
        ["1-3"],
        ["4", "head"],
    ]
    cut = predict(model(1.0, 1.0), (0, 3, 4), Pipeline("gpipe", 2, 4))
    assert [cut.contents(chunk) for chunk in range(2)] == [["embedding", "0-1"], ["head"]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.data())
def test_bottleneck_is_exact(values, data):
    num_chunks = data.draw(st.integers(1, len(values)))
    sums = np.concatenate([[0], np.cumsum(values)])
    # A chunk's own cost.
    factors = data.draw(st.lists(st.integers(1, 3), min_size=num_chunks, max_size=num_chunks))
    tables = []
    for factor in factors:
        table = (sums[None] - sums[:, None]) * float(factor)
        table[np.tril_indices(len(sums))] = math.inf
        tables.append(table)

    def worst(boundaries: tuple[int, ...]) -> int:
        return max(
            f * sum(values[a:b]) for f, (a, b) in zip(factors, pairwise(boundaries), strict=True)
        )

    boundaries, cost = bottleneck(tables)
    assert cost == min(map(worst, every_split(len(values), num_chunks)))
    assert worst(tuple(boundaries.tolist())) == cost
    assert (np.diff(boundaries) > 0).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 10**6))
def test_balanced_is_the_shortest_step_of_all(case, seed):
    schedule, p, v = case
    units = random_model(random.Random(seed), 5)
    pipeline = Pipeline(schedule, p, 6, v, latency_seconds=0.5, bytes_per_second=2.0)
    steps = [
        predict(units, cut, pipeline).timeline.seconds for cut in every_split(len(units), p * v)
    ]
    best = split("balanced", units, pipeline)
    # The search rounds at 1e-9 of all work.
    assert best.timeline.seconds == pytest.approx(min(steps), rel=1e-8)
    assert best.timeline.seconds >= bound_seconds(units, pipeline)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 10**6))
def test_the_memory_limit_is_met_or_the_smallest_one_named(case, seed):
    schedule, p, v = case
    units = random_model(random.Random(seed), 5)
    pipeline = Pipeline(schedule, p, 6, v)
    all_splits = [predict(units, cut, pipeline) for cut in every_split(len(units), p * v)]
    least = min(max(one.memory_bytes) for one in all_splits)
    if least:
        with pytest.raises(UserError, match="no split") as error:
            split("balanced", units, pipeline, limit_bytes=least - 1)
        # A millionth of a GiB, rounded up.
        assert least <= named_limit(error.value) * 2**30 < least + 1074
    limit = least + seed % 20 * MIB
    best = split("balanced", units, pipeline, limit_bytes=limit)
    fitting = [one.timeline.seconds for one in all_splits if max(one.memory_bytes) <= limit]
    assert max(best.memory_bytes) <= limit
    assert best.timeline.seconds == pytest.approx(min(fitting), rel=1e-8)


@settings(max_examples=60, deadline=None)
@example(("gpipe", 3, 1), 406)  # two limits of three are equal
@given(st.sampled_from(CASES), st.integers(0, 10**6))
def test_ranks_of_other_speeds_and_memory(case, seed):
    schedule, p, v = case
    draw = random.Random(seed)
    units = random_model(draw, 5)
    speeds = tuple(draw.choice((0.25, 0.5, 1.0, 3.0)) for _ in range(p))
    pipeline = Pipeline(schedule, p, 6, v, speeds=speeds)
    all_splits = [predict(units, cut, pipeline) for cut in every_split(len(units), p * v)]
    limits = [draw.randint(20, 150) * MIB for _ in range(p)]

    def excess(one: Split) -> int:
        return max(n - limit for n, limit in zip(one.memory_bytes, limits, strict=True))

    fitting = [one.timeline.seconds for one in all_splits if excess(one) <= 0]
    if fitting:
        best = split("balanced", units, pipeline, limits)
        assert excess(best) <= 0
        assert best.timeline.seconds == pytest.approx(min(fitting), rel=1e-8)
        assert best.timeline.seconds >= bound_seconds(units, pipeline)
    else:
        with pytest.raises(UserError, match="no split") as error:
            split("balanced", units, pipeline, limits)
        named = re.findall(r"[\d.]+", str(error.value).partition("memory_limit_gib to ")[2])
        least = min(excess(one) for one in all_splits)
        given = limits if len({*limits}) > 1 else limits[:1]  # one number where all are equal
        for gib, limit in zip(named, given, strict=True):
            assert 0 <= float(gib) * 2**30 - (limit + least) < 1074


def test_a_rank_of_half_the_speed_takes_twice_as_long():
    units = model(*[1.0] * 6)
    slow = replace(Pipeline("1f1b", 2, 4), speeds=(1.0, 0.5))
    assert split("balanced", units, slow).layers == (4, 2)
    alike, unlike = (
        predict(units, (0, 4, 8), pipeline).timeline for pipeline in (Pipeline("1f1b", 2, 4), slow)
    )
    lengths = [
        {rank: {e.end - e.start for e in timeline.events if e.rank == rank} for rank in (0, 1)}
        for timeline in (alike, unlike)
    ]
    assert lengths == [{0: {3.0}, 1: {3.0}}, {0: {3.0}, 1: {6.0}}]
    assert search(effective(units, "1f1b"), slow)[0].tolist() == [0, 5, 8]


def test_the_search_knows_speeds_and_limits_of_ranks():
    """Where there are too many splits to try."""
    draw = random.Random(3)
    for i in range(40):
        schedule, p, v = CASES[i % len(CASES)]
        costs = effective(random_model(draw, 6), schedule)
        speeds = tuple(draw.choice((0.5, 1.0, 2.0)) for _ in range(p))
        pipeline = Pipeline(schedule, p, 6, v, speeds=speeds)
        limits = [draw.randint(60, 400) * MIB for _ in range(p)]
        every = np.array(every_split(len(costs), p * v))
        table = scores(costs, pipeline, every, limits)
        best, excess = search(costs, pipeline, limits)
        found = scores(costs, pipeline, best[None], limits)[0]
        assert found[0] == excess
        assert excess <= 1.05 * table[:, 0].min() + MIB * (v > 1)
        if excess == 0:
            assert found[1] <= 1.06 * table[table[:, 0] == 0, 1].min()


def test_the_search_finds_what_brute_force_finds():
    """Where there are too many splits to try: nearly always the best, never far from it."""
    draw = random.Random(0)
    ratios = []
    for i in range(140):
        schedule, p, v = CASES[i % len(CASES)]
        costs = effective(random_model(draw, 8), schedule)
        pipeline = Pipeline(schedule, p, 6, v)
        best, _ = search(costs, pipeline)
        every = np.array([best, *every_split(len(costs), p * v)])
        steps = times(pipeline, Work.of(pipeline, costs, every))[1].max(axis=0)
        ratios.append(steps[0] / steps.min())
    assert sum(ratio < 1 + 1e-8 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) < 1.05


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-zero-bubble"])
def test_with_one_chunk_per_rank_the_search_knows_the_smallest_limit(schedule):
    draw = random.Random(2)
    for _ in range(10):
        units, pipeline = random_model(draw, 8), Pipeline(schedule, 4, 6)
        least = min(
            max(predict(units, cut, pipeline).memory_bytes) for cut in every_split(len(units), 4)
        )
        assert search(effective(units, schedule), pipeline, limit_bytes=0)[1] == least
        assert search(effective(units, schedule), pipeline, limit_bytes=least)[1] == 0


@pytest.mark.parametrize(
    ("schedule", "p", "v"), [("1f1b", 8, 1), ("interleaved-1f1b", 4, 4), ("zbv", 8, 2)]
)
def test_the_search_is_no_worse_than_where_it_starts(schedule, p, v):
    units = random_model(random.Random(1), 24)
    pipeline = Pipeline(schedule, p, 2 * p, v)
    balanced, uniform = split("balanced", units, pipeline), split("uniform", units, pipeline)
    assert balanced.timeline.seconds < uniform.timeline.seconds
    limit = max(uniform.memory_bytes)
    limited = split("balanced", units, pipeline, limit_bytes=limit)
    assert max(limited.memory_bytes) <= limit
    assert limited.timeline.seconds <= uniform.timeline.seconds
    with pytest.raises(UserError, match="no split") as error:
        split("balanced", units, pipeline, limit_bytes=1)
    least = named_limit(error.value) * 2**30
    assert max(split("balanced", units, pipeline, limit_bytes=least).memory_bytes) <= least


def test_a_large_model_is_quick():
    sums = np.arange(131.0)
    table = sums[None] - sums[:, None]
    table[np.tril_indices(131)] = math.inf
    started = time.process_time()
    _, worst = bottleneck([table] * 64)  # 128 layers, embedding and head; 16 ranks x 4
    assert time.process_time() - started < 1.0
    assert worst == 3.0  # 130 units over 64 chunks


def test_a_heavy_head_costs_a_uniform_split_two_fifths():
    # 24 layers, a head worth 9 of them, 4 ranks: 6 + 9 against the head alone, with 8 layers on
    # each other rank.
    units, pipeline = model(*[1.0] * 24, head=9.0), Pipeline("1f1b", 4, 64)
    uniform, balanced = split("uniform", units, pipeline), split("balanced", units, pipeline)
    assert max(chunk.seconds for chunk in uniform.chunks) == 2 * 15
    assert max(chunk.seconds for chunk in balanced.chunks) == 2 * 9
    assert balanced.boundaries[-2:] == (25, 26)
    assert bound_seconds(units, pipeline) == 64 * 2 * 9


def test_adapters_on_the_upper_half_gain_a_third():
    # 32 layers of 1 + 1, the upper 16 trained, so the lower 16 are 1 + 0. Uniform 16 and 32; 16 + 4
    # x 2 = 12 x 2 = 24.
    units = [
        unit(0.0, trainable=False),
        *(unit(1.0, trainable=i >= 16) for i in range(32)),
        unit(0.0, trainable=False),
    ]
    pipeline = Pipeline("1f1b", 2, 300)
    uniform, balanced = split("uniform", units, pipeline), split("balanced", units, pipeline)
    assert [chunk.seconds for chunk in uniform.chunks] == [16, 32]
    assert [chunk.seconds for chunk in balanced.chunks] == [24, 24]
    assert bound_seconds(units, pipeline) == 300 * 24
    # The first rank's forward before, and its backward of the last micro-batch after the last
    # rank's.
    assert uniform.timeline.seconds == 16 + 300 * 32
    assert uniform.timeline.seconds / balanced.timeline.seconds == pytest.approx(4 / 3, rel=0.01)
    # Where the gradient goes down to the embedding, both halves cost the same.
    assert [c.seconds for c in split("uniform", units, Pipeline("zbv", 2, 300, 2)).chunks] == [
        16,
        16,
        16,
        16,
    ]


def test_uniform_parameters_and_explicit():
    units = [unit(0.0, parameters=n) for n in (90, 10, 10, 10, 10, 10, 10, 10, 60)]
    pipeline = Pipeline("1f1b", 3, 4)
    # 3, 2 and 2 layers; embedding; head.
    assert split("uniform", units, pipeline).boundaries == (0, 4, 6, 9)
    assert max(chunk.parameters for chunk in split("parameters", units, pipeline).chunks) == 90
    explicit = split([2, 5, 0], units, pipeline)
    assert (explicit.boundaries, explicit.layers) == ((0, 3, 8, 9), (2, 5, 0))
    assert predict(units, (0, 1, 6, 9), pipeline).layers == (0, 5, 2)


def test_memory_counts_what_is_in_flight():
    units = [
        unit(1.0, weight_bytes=100, gradient_bytes=10, optimizer_bytes=20, activation_bytes=5)
    ] * 6
    # 1F1B on 3 ranks keeps 3, 2 and 1 micro-batches; two units a rank.
    assert split("uniform", units[:5], Pipeline("1f1b", 3, 8)).memory_bytes == (
        260 + 30,
        130 + 10,
        260 + 10,
    )
    # ZB-V: both of a rank's chunks count.
    assert split([1, 1, 1, 1], units, Pipeline("zbv", 2, 8, 2)).memory_bytes[1] == 260 + 5 * 4


def test_a_split_that_is_given_has_to_meet_the_limit():
    units = [unit(1.0, weight_bytes=10 * MIB)] * 6
    # 30 MiB of weights are 0.0292969 GiB, and 20 MiB are 0.01953125.
    with pytest.raises(UserError, match=r"0\.02929\d GiB .* 0\.01953125; .*balanced"):
        split("uniform", units, Pipeline("1f1b", 2, 8), limit_bytes=20 * MIB)


def test_every_schedule_splits():
    for schedule in ORDERS:
        v = 1 if schedule in ("gpipe", "1f1b") else 2
        balanced = split("balanced", model(*[1.0, 2.0] * 6, head=4.0), Pipeline(schedule, 4, 8, v))
        assert len(balanced.chunks) == 4 * v
