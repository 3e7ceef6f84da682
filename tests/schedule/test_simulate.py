"""The simulator against closed forms, and against steps worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.base.schedule.costs import Cost, effective
from shardwise.base.schedule.orders import ORDERS, Pipeline
from shardwise.base.schedule.simulate import in_flight, kept_microbatches, simulate, step_seconds
from shardwise.base.schedule.timeline import Timeline

SHAPES = [(1, 4), (2, 4), (3, 6), (4, 8), (4, 16)]
EXACT = 1e-12


def cost(forward: float, inputs: float, weights: float, **more: object) -> Cost:
    return Cost("unit", forward, inputs, weights, activation_bytes=1, output_bytes=10, **more)


def equal(
    schedule: str, p: int, m: int, v: int, forward: float, inputs: float, weights: float
) -> Timeline:
    return simulate(Pipeline(schedule, p, m, v), [cost(forward, inputs, weights)] * (p * v))


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(schedule, p, m):
    # m + p - 1 slots of a forward and a backward, of which each rank fills m.
    timeline = equal(schedule, p, m, 1, 1.0, 1.5, 0.5)
    assert timeline.seconds == pytest.approx((m + p - 1) * 3.0, rel=EXACT)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1), rel=EXACT)
    assert timeline.bubble() == pytest.approx((p - 1) / (m + p - 1), rel=EXACT)


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_more_chunks_per_rank_make_the_bubble_smaller(schedule, v, p, m):
    # arXiv 2104.04473, section 2.2: the ends cost p - 1 slots of one chunk instead of one rank's
    # whole share.
    assert equal(schedule, p, m, v, 1.0, 1.5, 0.5).seconds == pytest.approx(
        (v * m + p - 1) * 3.0, rel=EXACT
    )


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_without_weight_gradients_zero_bubble_is_1f1b(p, m):
    # Also for unequal stages: the two orders differ only in where the weight gradients stand, and
    # these take no time.
    stages = [cost(1.0 + i % 3, 2.0 - i % 2, 0.0) for i in range(p)]
    zero_bubble = simulate(Pipeline("interleaved-zero-bubble", p, m), stages).seconds
    assert zero_bubble == simulate(Pipeline("1f1b", p, m), stages).seconds


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_bubble_of_zb1p(p, m):
    # arXiv 2401.10241, table 1: p - 1 times forward + input's - weights' gradient.
    timeline = equal("interleaved-zero-bubble", p, m, 1, 1.0, 1.2, 0.9)
    assert timeline.seconds == pytest.approx(m * 3.1 + (p - 1) * (1.0 + 1.2 - 0.9), rel=EXACT)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_in_flight(p, m):
    assert in_flight(Pipeline("gpipe", p, m)) == (m,) * p
    assert in_flight(Pipeline("1f1b", p, m)) == tuple(min(p - rank, m) for rank in range(p))
    assert in_flight(Pipeline("looped-bfs", p, m, 2)) == (m,) * (2 * p)
    # ZB1P: p - 1 - rank forwards ahead, one, and as many as its weight gradients come late: rank.
    assert in_flight(Pipeline("interleaved-zero-bubble", p, m)) == (p,) * p
    for v in (1, 2, 3):
        for rank in range(p):
            # The forwards that go ahead (one round for each chunk but the last, and two for each
            # rank above), and one.
            together = (
                kept_microbatches(Pipeline("interleaved-1f1b", p, m, v), rank).sum(axis=1).max()
            )
            assert together == min((v - 1) * p + 2 * (p - 1 - rank) + 1, v * m)
    # ZB-V keeps what 1F1B keeps at the most, p micro-batches of a rank's share: 2p chunks of half
    # the size.
    assert max(kept_microbatches(Pipeline("zbv", p, m, 2), 0).sum(axis=1)) == 2 * p


def test_messages_take_their_time():
    # F 1, message 1 + 10 / 5, F 1 and B 2 above, message, B 2.
    pipeline = Pipeline("gpipe", 2, 1, latency_seconds=1.0, bytes_per_second=5.0)
    assert simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 2).seconds == 1 + 3 + 1 + 2 + 3 + 2


def test_nothing_is_sent_within_a_rank():
    pipeline = Pipeline("zbv", 1, 1, 2, latency_seconds=100.0)
    assert simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 2).seconds == 6


def test_the_first_chunk_does_its_whole_backward_with_its_weights():
    (first, second) = (
        [
            event
            for event in equal("interleaved-zero-bubble", 2, 2, 1, 1.0, 2.0, 4.0).events
            if event.rank == rank
        ]
        for rank in (0, 1)
    )
    assert {event.kind: event.end - event.start for event in first} == {
        "F": 1.0,
        "I": 0.0,
        "W": 6.0,
    }
    assert {event.kind: event.end - event.start for event in second} == {
        "F": 1.0,
        "I": 2.0,
        "W": 4.0,
    }


def test_running_the_backward_in_two_halves_costs_more():
    # One rank, two chunks: the second one's 2 + 4 + 1; the first one's halves run together.
    stages = [cost(1.0, 2.0, 4.0, split_seconds=1.0)] * 2
    assert simulate(Pipeline("zbv", 1, 1, 2), stages).seconds == 7 + 8
    assert simulate(Pipeline("looped-bfs", 1, 1, 2), stages).seconds == 7 + 7


def test_a_pair_sends_only_when_both_are_done():
    # DualPipe-V, last rank (1), chunks 1 and 2: torch posts the sends of a joined forward after the
    # backward in it.
    pipeline = Pipeline("dualpipe-v", 2, 4, 2)
    ends = {event[1:4]: event.end for event in simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 4).events}
    joined = [
        (action, order[i + 1])
        for rank in (0, 1)
        for order in [pipeline.order(rank)]
        for i, action in enumerate(order)
        if action.joined
    ]
    assert joined
    starts = {
        event[1:4]: event.start for event in simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 4).events
    }
    for forward, backward in joined:
        above = (forward.chunk + 1, forward.microbatch, "F")
        assert starts.get(above, float("inf")) >= ends[backward.chunk, backward.microbatch, "B"]


def test_a_stage_with_nothing_to_train_waits_for_no_gradient():
    # Rank 0 forwards four times and is done at 4; rank 1 starts at 1 and does four times 1 + 1.
    stages = effective([cost(1.0, 1.0, 0.0, trainable=False), cost(1.0, 1.0, 0.0)], "1f1b")
    timeline = simulate(Pipeline("1f1b", 2, 4), stages)
    assert timeline.seconds == 9
    assert [event.end for event in timeline.events if event.rank == 0] == [1, 2, 3, 4]
    # Where a gradient has to go down to the embedding, it is 1F1B's (m + p - 1) * 2.
    assert (
        simulate(Pipeline("interleaved-zero-bubble", 2, 4), [cost(1.0, 1.0, 0.0)] * 2).seconds == 10
    )


@pytest.mark.parametrize("schedule", ORDERS)
def test_timelines_are_possible(schedule):
    p, m, v = 4, 8, {"gpipe": 1, "1f1b": 1}.get(schedule, 2)
    pipeline = Pipeline(schedule, p, m, v, latency_seconds=0.1)
    chunks = [cost(1.0 + 0.3 * (i % 3), 1.1, 0.7 + 0.1 * i) for i in range(p * v)]
    timeline = simulate(pipeline, chunks)
    for rank in range(p):
        events = [event for event in timeline.events if event.rank == rank]
        assert all(one.end <= two.start for one, two in pairwise(events))
        assert [(e.chunk, e.kind, e.microbatch) for e in events] == [
            tuple(a[:3]) for a in pipeline.order(rank)
        ]
    at = {
        (event.kind == "F", event.chunk, event.microbatch): event
        for event in timeline.events
        if event.kind != "W"
    }
    for (forward, chunk, microbatch), event in at.items():
        source = at.get((forward, chunk - 1 if forward else chunk + 1, microbatch))
        if source is not None:
            sent = 0.1 * (pipeline.rank_of(source.chunk) != event.rank)
            assert event.start >= source.end + sent
    work = sum(chunk.seconds for chunk in chunks) * m
    busy = sum(timeline.seconds - timeline.idle_seconds(rank) for rank in range(p))
    assert busy == pytest.approx(work, rel=EXACT)


@pytest.mark.parametrize("num_frozen", [0, 1, 3])
@pytest.mark.parametrize("m", [8, 60])
@pytest.mark.parametrize("schedule", ORDERS)
def test_a_step_without_a_timeline_takes_as_long(schedule, m, num_frozen):
    """Also one so long that most of its middle is not simulated."""
    pipeline = Pipeline(schedule, 4, m, 2 if schedule in ("zbv", "dualpipe-v") else 1)
    if schedule in ("interleaved-1f1b", "looped-bfs"):
        pipeline = replace(pipeline, num_virtual=2)
    costs = [
        cost(1.0 + i % 3, 2.0 - i % 2, 0.5, output_seconds=0.1 * i)
        if i >= num_frozen
        else cost(1.0, 0.0, 0.0, backward=False)
        for i in range(pipeline.num_chunks)
    ]
    timeline = simulate(pipeline, costs)
    seconds, busy = step_seconds(pipeline, costs)
    assert seconds == pytest.approx(timeline.seconds, rel=EXACT)
    for rank in range(4):
        waits = timeline.idle_seconds(rank)
        assert seconds - busy[rank] == pytest.approx(waits, rel=EXACT, abs=EXACT)


def test_no_step_is_shorter_than_its_busiest_rank():
    """One rank overtakes another late in these steps: their last micro-batches take longer."""
    drawn = random.Random(0)
    overtaken = 0
    for _ in range(60):
        schedule, num_virtual = drawn.choice([("zbv", 2), ("interleaved-1f1b", 2), ("1f1b", 1)])
        ranks = drawn.choice([2, 4])
        pipeline = Pipeline(schedule, ranks, 32 * ranks, num_virtual)
        costs = [
            Cost(
                name="",
                forward_seconds=drawn.uniform(0.5, 2),
                input_seconds=drawn.uniform(0.5, 2),
                weight_seconds=drawn.choice([0.05, drawn.uniform(0.1, 1)]),
                activation_bytes=0,
                output_bytes=1,
                output_seconds=drawn.uniform(0, 0.5),
                backward=True,
            )
            for _ in range(pipeline.num_chunks)
        ]
        seconds, busy = step_seconds(pipeline, costs)
        right = simulate(pipeline, costs).seconds
        assert max(busy) <= seconds * (1 + EXACT)
        assert seconds == pytest.approx(right, rel=0.02)
        overtaken += abs(seconds / right - 1) > EXACT
    assert 0 < overtaken < 6
