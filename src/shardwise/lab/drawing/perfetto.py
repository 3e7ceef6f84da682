"""Timelines as trace event JSON, which ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Mapping

from shardwise.base.schedule.orders import KIND_NAMES
from shardwise.base.schedule.timeline import Timeline


def perfetto_trace(timelines: Mapping[str, Timeline]) -> str:
    """Return timelines, by name, as JSON in microseconds.

    Each timeline is a process. Each rank has two tracks in it: its actions, and its waits.
    """
    events: list[dict[str, object]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for rank in range(timeline.num_ranks):
            for tid, track in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} waits")):
                label = {"name": "thread_name", "args": {"name": track}}
                events.append({"ph": "M", "pid": pid, "tid": tid, **label})
        for event in timeline.events:
            span = _span(event.start, event.end) | {"pid": pid, "tid": 2 * event.rank}
            span |= {"name": f"{event.kind}{event.microbatch}", "cat": KIND_NAMES[event.kind]}
            events.append(span | {"args": {"chunk": event.chunk, "microbatch": event.microbatch}})
        for rank in range(timeline.num_ranks):
            for start, end in timeline.waits(rank):
                wait = {"pid": pid, "tid": 2 * rank + 1, "name": "wait", "cat": "wait"}
                events.append(_span(start, end) | wait)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _span(start: float, end: float) -> dict[str, object]:
    """Return a complete event ("X") from `start` to `end`, which are seconds."""
    return {"ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6}
