"""The order of forwards and backwards on each rank, for the schedules of torch's pipelining.

GPipe: arXiv 1811.06965. 1F1B and interleaved 1F1B: arXiv 2104.04473. Looped BFS: arXiv 2211.05953.
Interleaved zero bubble (ZB1P) and ZB-V: arXiv 2401.10241. DualPipe-V: arXiv 2412.19437. The orders
are those that torch runs, in all details; tests compare them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardwise.base.schedules import (
    V_SHAPED,
    least_microbatches,
    microbatches_left_over,
    virtual_stages_of,
)

Kind = Literal["F", "B", "I", "W"]
"""A forward; a whole backward; or one of its halves, the input's and the weights' gradients."""
KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}


class Action(NamedTuple):
    """One piece of work of a rank. A chunk is also called a virtual stage."""

    chunk: int
    kind: Kind
    microbatch: int
    joined: bool = False
    """Whether it forms a pair with the next action: its result leaves when both are done."""


@dataclass(frozen=True)
class Pipeline:
    """A schedule with its numbers of ranks and micro-batches, and the link between ranks."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_virtual: int = 1
    """Chunks per rank."""
    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    speeds: tuple[float, ...] = ()
    """How fast each rank computes, where 1 takes the seconds of its costs; (): all at 1."""

    def __post_init__(self) -> None:
        assert self.schedule in ORDERS, f"no schedule is called {self.schedule}"
        assert min(self.num_ranks, self.num_microbatches, self.num_virtual) >= 1
        assert len(self.speeds) in (0, self.num_ranks)
        assert self.num_virtual == virtual_stages_of(self.schedule, self.num_virtual)
        assert self.num_microbatches >= least_microbatches(self.schedule, self.num_ranks)
        assert not microbatches_left_over(self.schedule, self.num_ranks, self.num_microbatches)

    @property
    def v_shaped(self) -> bool:
        """Whether rank r has chunks r and 2p-1-r; otherwise it has r, r+p, r+2p, ..."""
        return self.schedule in V_SHAPED

    @property
    def num_chunks(self) -> int:
        """Chunks of the model, over all ranks."""
        return self.num_ranks * self.num_virtual

    def rank_of(self, chunk: int) -> int:
        """Return the rank that has a chunk."""
        if self.v_shaped:
            return min(chunk, self.num_chunks - 1 - chunk)
        return chunk % self.num_ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank, from the embedding up."""
        return tuple(chunk for chunk in range(self.num_chunks) if self.rank_of(chunk) == rank)

    def speed_of(self, chunk: int) -> float:
        """Return how fast the rank of a chunk computes."""
        return self.speeds[self.rank_of(chunk)] if self.speeds else 1.0

    def shortened(self) -> "Pipeline":
        """Return the same with fewer micro-batches, where there are many.

        The middle of a step, in which every group of as many micro-batches as there are ranks runs
        like the one before, has fewer such groups. Where all forwards come first there is none.
        """
        if self.schedule in ("gpipe", "looped-bfs"):
            return self
        groups, left_over = divmod(self.num_microbatches, self.num_ranks)
        number = min(groups, 4) * self.num_ranks + left_over
        return replace(self, num_microbatches=number)

    def order(self, rank: int) -> list[Action]:
        """Return the actions of a rank in the order in which it runs them."""
        return ORDERS[self.schedule](self, rank)


def _gpipe(pipeline: Pipeline, rank: int) -> list[Action]:
    m = range(pipeline.num_microbatches)
    return [*(Action(rank, "F", i) for i in m), *(Action(rank, "B", i) for i in m)]


def _looped_bfs(pipeline: Pipeline, rank: int) -> list[Action]:
    chunks, m = pipeline.chunks_of(rank), range(pipeline.num_microbatches)
    forwards = [Action(chunk, "F", i) for chunk in chunks for i in m]
    return forwards + [Action(chunk, "B", i) for chunk in reversed(chunks) for i in reversed(m)]


def _one_forward_one_backward(pipeline: Pipeline, rank: int) -> list[Action]:
    m = range(pipeline.num_microbatches)
    warmup = pipeline.num_ranks - 1 - rank
    return _alternate([Action(rank, "F", i) for i in m], [Action(rank, "B", i) for i in m], warmup)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then a forward and a backward in turn, then further backwards."""
    actions = forwards[:warmup]
    for i, backward in enumerate(backwards):
        actions += [*forwards[warmup + i : warmup + i + 1], backward]
    return actions


def _in_rounds(pipeline: Pipeline, rank: int) -> tuple[list[Action], list[Action], int]:
    """Return all forwards, all backwards, and how many forwards the last rank runs ahead.

    Micro-batches go in rounds of about `num_ranks`. Each round passes all chunks of a rank.
    """
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    size = m // max(1, m // p)
    rounds = [range(start, start + size) for start in range(0, m, size)]
    chunks = pipeline.chunks_of(rank)
    forwards = [Action(c, "F", i) for microbatches in rounds for c in chunks for i in microbatches]
    down = chunks[::-1]
    backwards = [Action(c, "B", i) for microbatches in rounds for c in down for i in microbatches]
    return forwards, backwards, (len(chunks) - 1) * size


def _interleaved(pipeline: Pipeline, rank: int) -> list[Action]:
    forwards, backwards, ahead = _in_rounds(pipeline, rank)
    return _alternate(forwards, backwards, ahead + 2 * (pipeline.num_ranks - 1 - rank))


def _interleaved_zero_bubble(pipeline: Pipeline, rank: int) -> list[Action]:
    """Run fewer forwards ahead, and each weight gradient `rank` backwards late, to fill bubbles."""
    forwards, backwards, ahead = _in_rounds(pipeline, rank)
    inputs = [backward._replace(kind="I") for backward in backwards]
    weights = deque(backward._replace(kind="W") for backward in backwards)
    actions: list[Action] = []
    late = -rank
    for action in _alternate(forwards, inputs, ahead + pipeline.num_ranks - 1 - rank):
        actions.append(action)
        if action.kind == "I":
            if late >= 0:
                actions.append(weights.popleft())
            late += 1
    return [*actions, *weights]


class _Writer:
    """Writes a V-shaped order for a rank's two chunks, 0 and 1, and counts their micro-batches."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self.actions: list[Action] = []
        # Weight gradients whose input gradients are in the order already.
        self.pending: deque[Action] = deque()
        self.forwards, self.backwards = [0, 0], [0, 0]
        self._chunks = pipeline.chunks_of(rank)

    def forward(self, *local_chunks: int, joined: bool = False) -> None:
        """Append the next forward of each of these chunks."""
        for local in local_chunks:
            action = Action(self._chunks[local], "F", self.forwards[local], joined)
            self.actions.append(action)
            self.forwards[local] += 1

    def backward(self, *local_chunks: int) -> None:
        """Append the next whole backward of each of these chunks."""
        for local in local_chunks:
            self.actions.append(Action(self._chunks[local], "B", self.backwards[local]))
            self.backwards[local] += 1

    def inputs(self, *local_chunks: int) -> None:
        """Append the next input gradient of each, which makes its weight gradient pending."""
        for local in local_chunks:
            self.actions.append(Action(self._chunks[local], "I", self.backwards[local]))
            self.pending.append(self.actions[-1]._replace(kind="W"))
            self.backwards[local] += 1

    def weight(self) -> None:
        """Append the oldest pending weight gradient, if there is one."""
        if self.pending:
            self.actions.append(self.pending.popleft())

    def joined(self, forward: int, backward: int) -> None:
        """Append a forward and a backward whose results leave together."""
        self.forward(forward, joined=True)
        self.backward(backward)


def _zbv(pipeline: Pipeline, rank: int) -> list[Action]:
    p = pipeline.num_ranks
    # The order is that of a full pipeline, without the micro-batches that do not exist.
    full = max(2 * p - 1, pipeline.num_microbatches)
    order = _Writer(pipeline, rank)
    order.forward(*[0] * (2 * (p - rank) - 1))
    order.forward(*[1, 0] * rank)
    for _ in range(p - rank):
        order.forward(1)
        order.inputs(1)
        order.weight()
    while order.forwards[1] < full:
        if order.forwards[0] < full:
            order.forward(0)
        order.inputs(0)
        order.weight()
        order.forward(1)
        order.inputs(1)
        order.weight()
    order.inputs(*[0, 1] * rank)
    late = [action for action in order.pending if action.chunk > rank]
    order.pending = deque(action for action in order.pending if action.chunk == rank)
    for _ in range(p - rank):
        order.inputs(0)
        order.weight()
    actions = [*order.actions, *late, *order.pending]
    return [action for action in actions if action.microbatch < pipeline.num_microbatches]


def _dualpipe_v(pipeline: Pipeline, rank: int) -> list[Action]:
    p = pipeline.num_ranks
    away = p - 1 - rank  # distance from the bottom of the V
    order = _Writer(pipeline, rank)
    order.forward(*[0] * (2 * away))
    order.forward(*[0, 1] * (rank + 1))
    for _ in range(away):
        order.inputs(1)
        order.weight()
        order.forward(1)
    for i in range(pipeline.num_microbatches - p - away):
        if i == away == 0:
            order.forward(0)
            order.backward(1)
        else:
            order.joined(0, 1)
        order.joined(1, 0)
    for _ in range(away):
        order.backward(1)
        order.joined(1, 0)
    last = [1, 0] * (rank + 1)
    order.backward(*last[: rank + 1])
    order.inputs(*last[rank + 1 :])
    for _ in range(away):
        order.weight()
        order.inputs(0)
    return [*order.actions, *order.pending]


ORDERS: dict[str, Callable[[Pipeline, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved-1f1b": _interleaved,
    "looped-bfs": _looped_bfs,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipe-v": _dualpipe_v,
}
