"""In which order each rank runs its forwards and backwards: the schedules of `torch.distributed.pipelining`.

GPipe arXiv 1811.06965, 1F1B and interleaved 1F1B arXiv 2104.04473, looped BFS arXiv 2211.05953, interleaved zero bubble
(ZB1P) and ZB-V arXiv 2401.10241, DualPipe-V arXiv 2412.19437. The orders are those that torch runs, in its own details;
tests compare them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.config import UserError, nearest

Kind = Literal["F", "B", "I", "W"]
"""A forward; a whole backward; or one of its halves, the input's and the weights' gradients."""
KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
}

V_SHAPED = ("zbv", "dualpipe-v")
"""Schedules under which rank r of p holds the stages r and 2p-1-r, and so the first rank both ends of the model."""


class Action(NamedTuple):
    """One piece of work of a rank. A chunk is what other texts call a virtual stage."""

    chunk: int
    kind: Kind
    microbatch: int
    joined: bool = False
    """Runs as a pair with the action after it: what it sends leaves only when both are done."""


@dataclass(frozen=True)
class Pipeline:
    """A schedule on so many ranks and micro-batches, and the link that carries a micro-batch between ranks."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_virtual: int = 1
    """Chunks per rank."""
    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def __post_init__(self) -> None:
        p, m, v = self.num_ranks, self.num_microbatches, self.num_virtual
        if self.schedule not in ORDERS:
            raise UserError(f"no schedule is called {self.schedule}; {nearest(self.schedule, list(ORDERS), 'names')}")
        if min(p, m, v) < 1:
            raise UserError(f"{p} ranks, {m} micro-batches, {v} virtual stages: give at least 1 of each")
        if v != 1 and self.schedule in ("gpipe", "1f1b"):
            raise UserError(f"{self.schedule} has one stage per rank, not {v}; set virtual_stages to 1")
        if v != 2 and self.v_shaped:
            raise UserError(f"{self.schedule} has two stages per rank, not {v}; set virtual_stages to 2")
        least = {"1f1b": p, "dualpipe-v": 2 * p}.get(self.schedule, 1)
        if m < least:
            raise UserError(
                f"{self.schedule} on {p} ranks needs {least} micro-batches or more, not {m}; raise the global batch "
                "size, lower the micro-batch size, or use gpipe"
            )
        rounds = max(1, m // p)
        if m % rounds and self.schedule.startswith("interleaved"):
            raise UserError(
                f"{self.schedule} on {p} ranks makes {rounds} equal rounds of {m} micro-batches, which does not work "
                f"out; give {m - m % rounds} by the global batch size"
            )

    @property
    def v_shaped(self) -> bool:
        """Rank r holds chunks r and 2p-1-r; otherwise r, r+p, r+2p, ..."""
        return self.schedule in V_SHAPED

    @property
    def num_chunks(self) -> int:
        """Chunks of the model over all ranks."""
        return self.num_ranks * self.num_virtual

    def rank_of(self, chunk: int) -> int:
        """The rank that holds a chunk."""
        return min(chunk, self.num_chunks - 1 - chunk) if self.v_shaped else chunk % self.num_ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, from the embedding's side."""
        return tuple(chunk for chunk in range(self.num_chunks) if self.rank_of(chunk) == rank)

    def order(self, rank: int) -> list[Action]:
        """What a rank does, one after the other."""
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
    warm = pipeline.num_ranks - 1 - rank
    return _alternate([Action(rank, "F", i) for i in m], [Action(rank, "B", i) for i in m], warm)


def _alternate(forwards: list[Action], backwards: list[Action], warm: int) -> list[Action]:
    """`warm` forwards first; then a forward and a backward by turns, and what is left of the backwards."""
    actions = forwards[:warm]
    for i, backward in enumerate(backwards):
        actions += [*forwards[warm + i : warm + i + 1], backward]
    return actions


def _in_rounds(pipeline: Pipeline, rank: int) -> tuple[list[Action], list[Action], int]:
    """All forwards and all backwards in their orders, and how many forwards the last rank is ahead.

    Micro-batches go in rounds of about `num_ranks`; each round passes through all of a rank's chunks.
    """
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    size = m // max(1, m // p)
    rounds = [range(start, start + size) for start in range(0, m, size)]
    chunks = pipeline.chunks_of(rank)
    forwards = [Action(chunk, "F", i) for microbatches in rounds for chunk in chunks for i in microbatches]
    backwards = [Action(chunk, "B", i) for microbatches in rounds for chunk in reversed(chunks) for i in microbatches]
    return forwards, backwards, (len(chunks) - 1) * size


def _interleaved(pipeline: Pipeline, rank: int) -> list[Action]:
    forwards, backwards, ahead = _in_rounds(pipeline, rank)
    return _alternate(forwards, backwards, ahead + 2 * (pipeline.num_ranks - 1 - rank))


def _interleaved_zero_bubble(pipeline: Pipeline, rank: int) -> list[Action]:
    """Fewer forwards ahead, and each weight gradient `rank` backwards late: it fills what would be a bubble."""
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
    """Writes a V-shaped order down, for a rank's two chunks, 0 and 1; knows each one's next micro-batch."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self.actions: list[Action] = []
        self.pending: deque[Action] = deque()  # the weight gradients whose input gradients are written
        self.forwards, self.backwards = [0, 0], [0, 0]
        self._chunks = pipeline.chunks_of(rank)

    def forward(self, *which: int, joined: bool = False) -> None:
        """The next forward of each of these chunks."""
        for local in which:
            self.actions.append(Action(self._chunks[local], "F", self.forwards[local], joined))
            self.forwards[local] += 1

    def backward(self, *which: int) -> None:
        """The next backward of each, in one go."""
        for local in which:
            self.actions.append(Action(self._chunks[local], "B", self.backwards[local]))
            self.backwards[local] += 1

    def inputs(self, *which: int) -> None:
        """The next input gradient of each; its weight gradient is pending then."""
        for local in which:
            self.actions.append(Action(self._chunks[local], "I", self.backwards[local]))
            self.pending.append(self.actions[-1]._replace(kind="W"))
            self.backwards[local] += 1

    def weight(self) -> None:
        """The oldest weight gradient that is pending, if any."""
        if self.pending:
            self.actions.append(self.pending.popleft())

    def joined(self, forward: int, backward: int) -> None:
        """A forward and a backward whose results leave together."""
        self.forward(forward, joined=True)
        self.backward(backward)


def _zbv(pipeline: Pipeline, rank: int) -> list[Action]:
    p = pipeline.num_ranks
    full = max(2 * p - 1, pipeline.num_microbatches)  # the order is that of a full pipeline, less what there is not
    todo = _Writer(pipeline, rank)
    todo.forward(*[0] * (2 * (p - rank) - 1))
    todo.forward(*[1, 0] * rank)
    for _ in range(p - rank):
        todo.forward(1)
        todo.inputs(1)
        todo.weight()
    while todo.forwards[1] < full:
        if todo.forwards[0] < full:
            todo.forward(0)
        todo.inputs(0)
        todo.weight()
        todo.forward(1)
        todo.inputs(1)
        todo.weight()
    todo.inputs(*[0, 1] * rank)
    late = [action for action in todo.pending if action.chunk > rank]
    todo.pending = deque(action for action in todo.pending if action.chunk == rank)
    for _ in range(p - rank):
        todo.inputs(0)
        todo.weight()
    actions = [*todo.actions, *late, *todo.pending]
    return [action for action in actions if action.microbatch < pipeline.num_microbatches]


def _dualpipe_v(pipeline: Pipeline, rank: int) -> list[Action]:
    p = pipeline.num_ranks
    away = p - 1 - rank  # from the bottom of the V
    todo = _Writer(pipeline, rank)
    todo.forward(*[0] * (2 * away))
    todo.forward(*[0, 1] * (rank + 1))
    for _ in range(away):
        todo.inputs(1)
        todo.weight()
        todo.forward(1)
    for i in range(pipeline.num_microbatches - p - away):
        if i == away == 0:
            todo.forward(0)
            todo.backward(1)
        else:
            todo.joined(0, 1)
        todo.joined(1, 0)
    for _ in range(away):
        todo.backward(1)
        todo.joined(1, 0)
    last = [1, 0] * (rank + 1)
    todo.backward(*last[: rank + 1])
    todo.inputs(*last[rank + 1 :])
    for _ in range(away):
        todo.weight()
        todo.inputs(0)
    return [*todo.actions, *todo.pending]


SPLITTING = ("interleaved-zero-bubble", "zbv", "dualpipe-v")
"""Schedules that run backwards in two halves, first the gradient of a stage's input, later those of its weights. The
first starts from a stage's output and needs an input that requires a gradient, all the way down to the embedding, even
where nothing there is trained. Under the others a stage with nothing trainable at or below it runs no backward."""

ORDERS: dict[str, Callable[[Pipeline, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved-1f1b": _interleaved,
    "looped-bfs": _looped_bfs,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipe-v": _dualpipe_v,
}
