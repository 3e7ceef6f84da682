"""Messages of a pipeline that have a buffer before the action that reads them runs."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from shardwise.base.schedule.orders import Action, Pipeline
from shardwise.base.schedules import ONE_STAGE

Early = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of outputs from below and of gradients from above, by chunk of a rank."""
Message = tuple[str, int, int]
"""F for an output or B for a gradient, the chunk that reads it, and the micro-batch."""


@lru_cache(maxsize=32)
def early_messages(pipeline: Pipeline) -> tuple[tuple[Early, ...], ...]:
    """Return what waits for other actions than the one that runs: [rank][action of its order].

    torch lists a receive where it lists the send, as if the ranks took an action each in turn.
    """
    orders = [pipeline.order(rank) for rank in range(pipeline.num_ranks)]
    if pipeline.schedule in ONE_STAGE:
        return tuple((((0,), (0,)),) * len(order) for order in orders)
    waiting, arrived = Counter[tuple[str, int]](), set[Message]()
    found: list[list[Early]] = [[] for _ in orders]
    num_left = sum(map(len, orders))
    while num_left:
        num_before = num_left
        for rank, order in enumerate(orders):
            group = _joined(order, len(found[rank]))
            if not arrived.issuperset(filter(None, (_read(pipeline, a) for a in group))):
                continue
            chunks = pipeline.chunks_of(rank)
            for action in group:
                _count(pipeline, waiting, _freed(pipeline, action), -1)
                early = (tuple(waiting[way, chunk] for chunk in chunks) for way in "FB")
                found[rank].append((next(early), next(early)))
            for action in group:
                sent = _sent(pipeline, action)
                _count(pipeline, waiting, sent, 1)
                arrived |= {sent} if sent else set()
            num_left -= len(group)
        assert num_left < num_before, f"{pipeline}: every rank waits for another one"
    return tuple(map(tuple, found))


def _joined(order: Sequence[Action], place: int) -> Sequence[Action]:
    """Return the next action, with those that it is joined to; none at the end."""
    end = place
    while end < len(order) and order[end].joined:
        end += 1
    return order[place : end + 1]


def _read(pipeline: Pipeline, action: Action) -> Message | None:
    """Return what an action waits for."""
    chunk, kind, microbatch, _ = action
    if kind == "F":
        return ("F", chunk, microbatch) if chunk else None
    is_last = chunk == pipeline.num_chunks - 1
    return None if kind == "W" or is_last else ("B", chunk, microbatch)


def _freed(pipeline: Pipeline, action: Action) -> Message | None:
    """Return what need not wait any longer once an action runs.

    torch's first stage runs all of a halved backward in the second half.
    """
    chunk, kind, microbatch, _ = action
    if chunk == 0 and kind in "IW":
        return ("B", 0, microbatch) if kind == "W" else None
    return _read(pipeline, action)


def _sent(pipeline: Pipeline, action: Action) -> Message | None:
    """Return what the chunk above or below waits for, once an action has run."""
    chunk, kind, microbatch, _ = action
    if kind == "F":
        return None if chunk == pipeline.num_chunks - 1 else ("F", chunk + 1, microbatch)
    return None if kind == "W" or chunk == 0 else ("B", chunk - 1, microbatch)


def _count(
    pipeline: Pipeline, waiting: Counter[tuple[str, int]], message: Message | None, step: int
) -> None:
    """Count a message from another rank."""
    if message is not None:
        way, chunk, _ = message
        sender = chunk - 1 if way == "F" else chunk + 1
        if pipeline.rank_of(sender) != pipeline.rank_of(chunk):
            waiting[way, chunk] += step
