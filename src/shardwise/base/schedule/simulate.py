"""A simulator of pipelines: when each rank runs what, and how much memory it needs for that.

A rank runs one action at a time, in the order of its schedule. An action starts as soon as the rank
is free and its input has arrived: a forward needs the output of the chunk below, a backward the
gradient from the chunk above. A message takes latency plus bytes over bandwidth. It delays neither
work nor other messages, and takes no time within a rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.orders import KIND_NAMES, Action, Kind, Pipeline
from shardwise.base.schedule.timeline import Event, Timeline

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """The costs of the chunks of many splits on their ranks: arrays [chunk, split]."""

    forward_seconds: Floats
    input_seconds: Floats
    weight_seconds: Floats
    split_seconds: Floats
    activation_bytes: Floats
    state_bytes: Floats
    output_bytes: Floats
    output_seconds: Floats
    stage_seconds: Floats
    backward: npt.NDArray[np.bool_]

    @staticmethod
    def of(pipeline: Pipeline, units: Sequence[Cost], boundaries: npt.NDArray[np.int64]) -> "Work":
        """Add up the costs of units by chunk; seconds are those at the speeds of the ranks.

        `boundaries` [split, chunk + 1]: chunk c of split s is
        units[boundaries[s, c]:boundaries[s, c + 1]].
        """
        low, high = boundaries[:, :-1].T, boundaries[:, 1:].T
        slow = slowness(pipeline)

        def total(name: str) -> Floats:
            sums = np.concatenate([[0.0], np.cumsum([getattr(unit, name) for unit in units])])
            return sums[high] - sums[low]

        def last_of(name: str) -> Floats:
            return np.array([float(getattr(unit, name)) for unit in units])[high - 1]

        return Work(
            forward_seconds=slow * total("forward_seconds"),
            input_seconds=slow * total("input_seconds"),
            weight_seconds=slow * total("weight_seconds"),
            split_seconds=slow * total("split_seconds"),
            activation_bytes=total("activation_bytes"),
            state_bytes=total("state_bytes"),
            output_bytes=last_of("output_bytes"),
            output_seconds=last_of("output_seconds"),
            stage_seconds=slow * last_of("stage_seconds"),
            backward=total("backward") > 0,
        )

    @property
    def seconds(self) -> Floats:
        """Forward and backward of one micro-batch: [chunk, split]."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds


def slowness(pipeline: Pipeline) -> Floats:
    """Return how many times as long as its costs each chunk takes on its rank: [chunk, 1]."""
    return 1 / np.array([[pipeline.speed_of(chunk)] for chunk in range(pipeline.num_chunks)])


def simulate(pipeline: Pipeline, chunks: Sequence[Cost]) -> Timeline:
    """Return one step of the pipeline. `chunks` are its costs, from the embedding up.

    They are sums of units after `costs.effective`.
    """
    assert len(chunks) == pipeline.num_chunks, f"{len(chunks)} costs, {pipeline.num_chunks} chunks"
    starts, ends = times(pipeline, Work.of(pipeline, chunks, np.arange(len(chunks) + 1)[None]))
    events = []
    for (action, *_), start, end in zip(_plan(pipeline), starts[:, 0], ends[:, 0], strict=True):
        chunk, kind, microbatch, _ = action
        if kind == "F" or chunks[chunk].backward:
            rank = pipeline.rank_of(chunk)
            events.append(Event(rank, chunk, microbatch, kind, float(start), float(end)))
    events.sort(key=lambda event: (event.rank, event.start, event.end))
    return Timeline(pipeline.num_ranks, tuple(events))


def times(pipeline: Pipeline, work: Work) -> tuple[Floats, Floats]:
    """Return start and end of every action: [action, split], in the order of `_plan`."""
    plan = _plan(pipeline)
    seconds = _seconds(work)
    delay = _delays(pipeline, work)
    num_splits = work.seconds.shape[1]
    starts = np.zeros((len(plan), num_splits))
    # The last row, which has index -1, is the start of the step.
    ends = np.zeros((len(plan) + 1, num_splits))
    for index, (action, _, before, source) in enumerate(plan):
        start = ends[before]
        if source >= 0:
            start = np.maximum(start, ends[source] + delay[action.kind][action.chunk])
        starts[index] = start
        ends[index] = start + seconds[action.kind][action.chunk]
    return starts, ends[:-1]


def _seconds(work: Work) -> dict[Kind, Floats]:
    """Return how long each kind of action takes: [chunk, split]."""
    fused = work.input_seconds + work.weight_seconds
    inputs, weights = work.input_seconds.copy(), work.weight_seconds + work.split_seconds
    # The first chunk sends no gradient: torch runs its whole backward in the place of its weights'.
    inputs[0], weights[0] = 0.0, fused[0]
    return {"F": work.forward_seconds + work.stage_seconds, "B": fused, "I": inputs, "W": weights}


def _delays(pipeline: Pipeline, work: Work) -> dict[Kind, Floats]:
    """Return how long after the result of its neighbour an action may start: [chunk, split].

    It is -inf where nothing is sent, so that nothing is waited for.
    """
    last = pipeline.num_chunks - 1
    # output_bytes from the rank of chunk c to the rank of chunk c + 1, and as many bytes back.
    transfer = work.output_bytes[:last] / pipeline.bytes_per_second
    message = pipeline.latency_seconds + transfer + work.output_seconds[:last]
    message = np.where(crosses_ranks(pipeline), message, 0.0)
    forward = np.concatenate([np.zeros_like(message[:1]), message])
    backward = np.where(work.backward[:last], message, -np.inf)
    return {"F": forward, "B": backward, "I": backward}


def crosses_ranks(pipeline: Pipeline) -> npt.NDArray[np.bool_]:
    """Return whether each chunk except the last has its next chunk on another rank: [chunk, 1]."""
    ranks = np.array([pipeline.rank_of(chunk) for chunk in range(pipeline.num_chunks)])
    return (ranks[:-1] != ranks[1:]).reshape(-1, 1)


def step_seconds(pipeline: Pipeline, chunks: Sequence[Cost]) -> tuple[float, list[float]]:
    """Return the seconds of one step, and those in which each rank is busy, without a timeline.

    They are those of `simulate`, in less time where micro-batches are many: a further group of them
    takes as long as the one before. That is exact up to rounding, except where one rank becomes the
    busiest late in a step: then up to 2 %.
    """
    short = pipeline.shortened()
    left_out = pipeline.num_microbatches - short.num_microbatches
    if left_out <= 2 * short.num_microbatches:
        return _step_seconds(pipeline, chunks)
    longer = replace(short, num_microbatches=short.num_microbatches + pipeline.num_ranks)
    (seconds, busy), (more, _) = _step_seconds(short, chunks), _step_seconds(longer, chunks)
    times_as_busy = pipeline.num_microbatches / short.num_microbatches
    groups = left_out / pipeline.num_ranks
    busy = [times_as_busy * part for part in busy]
    return max(seconds + groups * (more - seconds), *busy), busy


def _step_seconds(pipeline: Pipeline, chunks: Sequence[Cost]) -> tuple[float, list[float]]:
    assert len(chunks) == pipeline.num_chunks, f"{len(chunks)} costs, {pipeline.num_chunks} chunks"
    work = Work.of(pipeline, chunks, np.arange(len(chunks) + 1)[None])
    actions, numbers = _sorts(pipeline)
    seconds, delays = [0.0] * len(numbers), [0.0] * len(numbers)
    for columns, by_sort in ((_seconds(work), seconds), (_delays(pipeline, work), delays)):
        for kind, column in columns.items():
            first = _first_sort(pipeline, kind)
            by_sort[first : first + len(column)] = column[:, 0].tolist()
    ends: list[float] = []
    free = [0.0] * pipeline.num_ranks
    # There are many actions: `max`, and a look-up by kind and chunk, take longer.
    for sort, rank, source in actions:
        end = free[rank]
        if source >= 0:
            arrival = ends[source] + delays[sort]
            if arrival > end:
                end = arrival
        end += seconds[sort]
        free[rank] = end
        ends.append(end)
    busy = [0.0] * pipeline.num_ranks
    for sort, number in enumerate(numbers):
        busy[pipeline.rank_of(sort % pipeline.num_chunks)] += number * seconds[sort]
    return max(free), busy


def _first_sort(pipeline: Pipeline, kind: Kind) -> int:
    return [*KIND_NAMES].index(kind) * pipeline.num_chunks


@lru_cache(maxsize=32)
def _sorts(pipeline: Pipeline) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]:
    """Return `_plan` in numbers, and how many actions of each sort it has.

    They are the sort of an action, which tells its kind and chunk, its rank, and the index of the
    action whose message it waits for.
    """
    firsts = {kind: _first_sort(pipeline, kind) for kind in KIND_NAMES}
    actions = tuple((firsts[a.kind] + a.chunk, rank, of) for a, rank, _, of in _plan(pipeline))
    found = Counter(sort for sort, *_ in actions)
    return actions, tuple(found[i] for i in range(len(firsts) * pipeline.num_chunks))


# A search asks for one several times in turn. Not all are kept: a long pipeline has many actions.
@lru_cache(maxsize=32)
def _plan(pipeline: Pipeline) -> tuple[tuple[Action, int, int, int], ...]:
    """Return every action of every rank, each after the actions that it depends on.

    Beside an action stand its rank and two indices into the plan, -1 for none: the rank's previous
    action, and the action whose message it waits for.
    """
    return tuple(_in_order(pipeline))


def _in_order(pipeline: Pipeline) -> Iterator[tuple[Action, int, int, int]]:
    orders = [pipeline.order(rank) for rank in range(pipeline.num_ranks)]
    num_chunks, m = pipeline.num_chunks, pipeline.num_microbatches
    # The index of the action after which a result is sent, -1 before: those of forwards, by chunk
    # and micro-batch, then those of backwards. There are many: tuples as keys take longer.
    sent = [-1] * (2 * num_chunks * m)
    places, before = [0] * len(orders), [-1] * len(orders)
    unsent: list[list[int]] = [[] for _ in orders]
    index, num_actions = 0, sum(map(len, orders))
    while index < num_actions:
        num_planned = index
        for rank, order in enumerate(orders):
            for place in range(places[rank], len(order)):
                action = order[place]
                chunk, kind, microbatch, joined = action
                forward, backward = chunk * m, (num_chunks + chunk) * m
                source = -1
                if kind == "F" and chunk:
                    source = forward - m + microbatch
                elif kind in "BI" and chunk < num_chunks - 1:
                    source = backward + m + microbatch
                if source >= 0:
                    source = sent[source]
                    if source < 0:
                        break
                yield action, rank, before[rank], source
                places[rank] = place + 1
                before[rank] = index
                if kind != "W":
                    unsent[rank].append((forward if kind == "F" else backward) + microbatch)
                if not joined:
                    for result in unsent[rank]:
                        sent[result] = index
                    unsent[rank].clear()
                index += 1
        assert index > num_planned, f"{pipeline}: every rank waits for another one"


@lru_cache(maxsize=64)
def kept_microbatches(pipeline: Pipeline, rank: int) -> Floats:
    """Return of how many micro-batches a rank keeps activations: [moment, chunk of the rank].

    A chunk keeps them from the start of a forward to the end of the backward, or of the weights'
    gradients where the two halves run separately. The numbers follow from the order alone; a chunk
    without a backward has activations of 0 bytes.
    """
    chunks = pipeline.chunks_of(rank)
    now = [0] * len(chunks)
    moments = set()
    for action in pipeline.order(rank):
        if action.kind != "I":
            now[chunks.index(action.chunk)] += 1 if action.kind == "F" else -1
            moments.add(tuple(now))
    return np.array(sorted(moments), dtype=float)


def in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """Return the most micro-batches of which each chunk keeps activations at the same time."""
    most: dict[int, int] = {}
    for rank in range(pipeline.num_ranks):
        columns = kept_microbatches(pipeline, rank).T
        for chunk, column in zip(pipeline.chunks_of(rank), columns, strict=True):
            most[chunk] = int(column.max())
    return tuple(most[chunk] for chunk in range(pipeline.num_chunks))


def memory_bytes(pipeline: Pipeline, work: Work) -> Floats:
    """Return the peak memory of each rank, state and activations in flight: [rank, split]."""
    ranks = []
    for rank in range(pipeline.num_ranks):
        chunks = list(pipeline.chunks_of(rank))
        kept = kept_microbatches(pipeline, rank) @ work.activation_bytes[chunks]
        ranks.append(work.state_bytes[chunks].sum(axis=0) + kept.max(axis=0))
    return np.stack(ranks)
