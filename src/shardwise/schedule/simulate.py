"""When each rank of a pipeline does what, and what it holds meanwhile: a simulator on the costs of its chunks.

A rank does one thing at a time, in its schedule's order, as soon as it is free and what the action needs has come: a
forward needs the output of the chunk below, a backward the gradient from the chunk above. A message takes latency plus
bytes over bandwidth, holds up no work on either side and no other message, and takes nothing within a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Action, Kind, Pipeline
from shardwise.schedule.timeline import Event, Timeline

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """The chunks of many splits at once: arrays [chunk, split]."""

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
    def of(units: Sequence[Cost], boundaries: npt.NDArray[np.int64]) -> Work:
        """Chunk c of split s is units[boundaries[s, c]:boundaries[s, c + 1]]."""
        low, high = boundaries[:, :-1].T, boundaries[:, 1:].T

        def total(name: str) -> Floats:
            sums = np.concatenate([[0.0], np.cumsum([getattr(unit, name) for unit in units])])
            return sums[high] - sums[low]

        def of_last(name: str) -> Floats:
            return np.array([float(getattr(unit, name)) for unit in units])[high - 1]

        return Work(
            forward_seconds=total("forward_seconds"),
            input_seconds=total("input_seconds"),
            weight_seconds=total("weight_seconds"),
            split_seconds=total("split_seconds"),
            activation_bytes=total("activation_bytes"),
            state_bytes=total("state_bytes"),
            output_bytes=of_last("output_bytes"),
            output_seconds=of_last("output_seconds"),
            stage_seconds=of_last("stage_seconds"),
            backward=total("backward") > 0,
        )

    @property
    def seconds(self) -> Floats:
        """Forward and backward of one micro-batch."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds


def simulate(pipeline: Pipeline, chunks: Sequence[Cost]) -> Timeline:
    """One step of the pipeline; `chunks` from the embedding up, after `costs.effective`."""
    assert len(chunks) == pipeline.num_chunks, f"{len(chunks)} costs for {pipeline.num_chunks} chunks"
    starts, ends = times(pipeline, Work.of(chunks, np.arange(len(chunks) + 1)[None]))
    events = (
        Event(pipeline.rank_of(action.chunk), action.chunk, action.microbatch, action.kind, float(start), float(end))
        for (action, _, _), start, end in zip(_plan(pipeline), starts[:, 0], ends[:, 0], strict=True)
        if action.kind == "F" or chunks[action.chunk].backward
    )
    return Timeline(pipeline.num_ranks, tuple(sorted(events, key=lambda event: (event.rank, event.start, event.end))))


def times(pipeline: Pipeline, work: Work) -> tuple[Floats, Floats]:
    """Start and end of every action of every split: [action, split], in an order in which each can be computed."""
    plan = _plan(pipeline)
    seconds = _seconds(work)
    delay = _delays(pipeline, work)
    starts = np.zeros((len(plan), work.seconds.shape[1]))
    ends = np.zeros((len(plan) + 1, work.seconds.shape[1]))  # the last row, index -1, is the start of the step
    for index, (action, before, needs) in enumerate(plan):
        start = ends[before]
        if needs >= 0:
            start = np.maximum(start, ends[needs] + delay[action.kind][action.chunk])
        starts[index] = start
        ends[index] = start + seconds[action.kind][action.chunk]
    return starts, ends[:-1]


def _seconds(work: Work) -> dict[Kind, Floats]:
    fused = work.input_seconds + work.weight_seconds
    inputs, weights = work.input_seconds.copy(), work.weight_seconds + work.split_seconds
    # The first chunk sends no gradient on: torch leaves its whole backward to where its weights' turn is.
    inputs[0], weights[0] = 0.0, fused[0]
    return {"F": work.forward_seconds + work.stage_seconds, "B": fused, "I": inputs, "W": weights}


def _delays(pipeline: Pipeline, work: Work) -> dict[Kind, Floats]:
    """How long after its neighbour's result an action may start; -inf where nothing is sent, so nothing is awaited."""
    last = pipeline.num_chunks - 1
    # output_bytes from the rank of chunk c to that of c + 1, and as many back as its gradient.
    message = (
        pipeline.latency_seconds + work.output_bytes[:last] / pipeline.bytes_per_second + work.output_seconds[:last]
    )
    message = np.where(crosses(pipeline), message, 0.0)
    forward = np.concatenate([np.zeros_like(message[:1]), message])
    backward = np.where(work.backward[:last], message, -np.inf)
    return {"F": forward, "B": backward, "I": backward}


def crosses(pipeline: Pipeline) -> npt.NDArray[np.bool_]:
    """Whether each chunk but the last is on another rank than the next: [chunk, 1]."""
    below = range(pipeline.num_chunks - 1)
    return np.array([[pipeline.rank_of(chunk) != pipeline.rank_of(chunk + 1)] for chunk in below], bool).reshape(-1, 1)


@lru_cache(maxsize=64)
def _plan(pipeline: Pipeline) -> tuple[tuple[Action, int, int], ...]:
    """Every action after what it depends on: (action, the rank's action before it, the one it hears from), or -1."""
    todo = [deque(pipeline.order(rank)) for rank in range(pipeline.num_ranks)]
    plan: list[tuple[Action, int, int]] = []
    sent: dict[tuple[bool, int, int], int] = {}  # (forward?, chunk, micro-batch) -> the action after which it leaves
    before, unsent = [-1] * len(todo), [[] for _ in todo]
    while any(todo):
        planned = len(plan)
        for rank, order in enumerate(todo):
            while order and ((source := _source(order[0], pipeline.num_chunks)) is None or source in sent):
                action = order.popleft()
                plan.append((action, before[rank], sent[source] if source else -1))
                before[rank] = len(plan) - 1
                if action.kind != "W":
                    unsent[rank].append((action.kind == "F", action.chunk, action.microbatch))
                if not action.joined:
                    sent.update(dict.fromkeys(unsent[rank], before[rank]))
                    unsent[rank].clear()
        assert len(plan) > planned, f"{pipeline}: every rank waits for another"
    return tuple(plan)


def _source(action: Action, num_chunks: int) -> tuple[bool, int, int] | None:
    """Whose result an action needs from another chunk."""
    if action.kind == "F":
        return (True, action.chunk - 1, action.microbatch) if action.chunk else None
    if action.kind == "W" or action.chunk == num_chunks - 1:
        return None
    return (False, action.chunk + 1, action.microbatch)


@lru_cache(maxsize=64)
def held(pipeline: Pipeline, rank: int) -> Floats:
    """Micro-batches whose activations a rank holds in each of its chunks: [moment, chunk of the rank].

    From the start of a forward to the end of the backward, or of the weights' gradients where the two run apart. It
    follows from the order alone. A chunk without a backward holds none: its `activation_bytes` are 0.
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
    """The most micro-batches that each chunk holds activations of at a time."""
    most = {
        chunk: int(column.max())
        for rank in range(pipeline.num_ranks)
        for chunk, column in zip(pipeline.chunks_of(rank), held(pipeline, rank).T, strict=True)
    }
    return tuple(most[chunk] for chunk in range(pipeline.num_chunks))


def memory_bytes(pipeline: Pipeline, work: Work) -> Floats:
    """What each rank holds at its peak, of state, activations in flight and messages that were sent: [rank, split]."""
    message = np.where(crosses(pipeline), work.output_bytes[:-1], 0.0) * kept_messages(pipeline)
    sent = np.zeros_like(work.output_bytes)
    sent[:-1] += message
    sent[1:] += message * work.backward[:-1]
    ranks = []
    for rank in range(pipeline.num_ranks):
        chunks = list(pipeline.chunks_of(rank))
        activations = (held(pipeline, rank) @ work.activation_bytes[chunks]).max(axis=0)
        ranks.append((work.state_bytes + sent)[chunks].sum(axis=0) + activations)
    return np.stack(ranks)


def kept_messages(pipeline: Pipeline) -> int:
    """How many of those that go one way between two chunks torch keeps until the step ends: all, or none."""
    return 0 if pipeline.schedule in ("gpipe", "1f1b") else pipeline.num_microbatches
