from __future__ import annotations

import json

import pytest

from shardwise.lab.drawing.perfetto import perfetto_trace
from tests.drawing.conftest import two_timelines


def test_a_trace_has_every_action_on_its_ranks_track():
    timelines = two_timelines()
    trace = json.loads(perfetto_trace(timelines))
    for pid, (name, timeline) in enumerate(timelines.items()):
        events = [event for event in trace["traceEvents"] if event["pid"] == pid]
        names = {
            event["name"]: event for event in events if event["ph"] == "M" and "tid" not in event
        }
        assert names["process_name"]["args"] == {"name": name}
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert tracks == {0: "rank 0", 1: "rank 0 waits", 2: "rank 1", 3: "rank 1 waits"}
        spans = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
        assert len(spans) == len(timeline.events)
        for span, event in zip(spans, timeline.events, strict=True):
            assert span["name"] == f"{event.kind}{event.microbatch}"
            assert span["tid"] == 2 * event.rank
            assert span["ts"] == event.start * 1e6
            assert span["ts"] + span["dur"] == pytest.approx(event.end * 1e6)
            assert span["args"] == {"chunk": event.chunk, "microbatch": event.microbatch}
        for rank in (0, 1):
            waits = [
                e["dur"] for e in events if e.get("cat") == "wait" and e["tid"] == 2 * rank + 1
            ]
            assert sum(waits) == pytest.approx(timeline.idle_seconds(rank) * 1e6)
            assert len(waits) == len(timeline.waits(rank))
    assert timelines["uniform"].waits(1)
