"""Traces and charts: well formed, and each action is where it ran."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import Event, Timeline, simulate
from shardwise.schedule.trace import chrome_trace, gantt, pack, text_chart, unpack
from tests.schedule.test_simulate import cost

SVG = "{http://www.w3.org/2000/svg}"


def timelines() -> dict[str, Timeline]:
    pipeline = Pipeline("zbv", 2, 4, 2)
    return {
        "uniform": simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 3 + [cost(3.0, 3.0, 3.0)]),
        "<balanced> & 'more'": simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 4),
    }


def test_a_trace_has_every_action_on_its_ranks_track():
    told = timelines()
    trace = json.loads(chrome_trace(told))
    for pid, (name, timeline) in enumerate(told.items()):
        events = [event for event in trace["traceEvents"] if event["pid"] == pid]
        names = {event["name"]: event for event in events if event["ph"] == "M" and "tid" not in event}
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
            waits = [e["dur"] for e in events if e.get("cat") == "wait" and e["tid"] == 2 * rank + 1]
            assert sum(waits) == pytest.approx(timeline.idle_seconds(rank) * 1e6)
            assert len(waits) == len(timeline.waits(rank))
    assert told["uniform"].waits(1)


def test_a_packed_timeline_is_what_it_was_to_the_microsecond():
    short = simulate(Pipeline("zbv", 2, 4, 2), [cost(0.0010004, 0.002, 0.003)] * 4)
    again = unpack(pack(short))
    assert again.num_ranks == 2
    for event, same in zip(short.events, again.events, strict=True):
        assert same[:4] == event[:4]
        assert same[4:] == pytest.approx(event[4:], abs=0.51e-6)
    for broken in ("F 0 0 1", "X 0 0 1 2", "F 0 0 1 two", ""):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            unpack([broken])


def test_a_chart_is_xml_and_has_one_time_axis():
    told = timelines()
    svg = gantt(told)
    root = ElementTree.fromstring(svg)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    for name, timeline in told.items():
        assert name in texts
        assert any(f"bubble {timeline.bubble():.1%}" in text for text in texts)
        for rank in (0, 1):
            assert f"{timeline.bubble(rank):.1%} idle" in texts
    bars = [(bar, title.text or "") for bar in root.iter(f"{SVG}rect") for title in bar.iter(f"{SVG}title")]
    events = [event for timeline in told.values() for event in timeline.events if event.end > event.start]
    assert len(bars) == len(events)
    scales = [
        (float(bar.attrib["x"]) - 64) / event.start
        for event, (bar, title) in zip(events, bars, strict=True)
        if event.start
    ]
    assert max(scales) == pytest.approx(min(scales), rel=0.01)  # places are written to 0.01
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) <= 960 - 92 for bar, _ in bars)


def test_a_chart_follows_the_page_or_the_reader():
    assert "color-scheme" in gantt(timelines())
    assert "color-scheme" not in gantt(timelines(), standalone=False)
    assert "id=" not in gantt(timelines())  # two charts on a page do not clash


def test_a_chart_in_text_has_a_row_for_each_rank_on_one_axis():
    # Two micro-batches, forwards of 1 s, backwards of 2 s: rank 0 waits for rank 1's first backward, then its second.
    even = simulate(Pipeline("1f1b", 2, 2), [cost(1.0, 2.0, 0.0)] * 2)
    half = Timeline(
        1, (Event(0, 0, 0, "F", 0.0, 2.125), Event(0, 0, 0, "I", 2.125, 4.0), Event(0, 0, 0, "W", 4.0, 4.5))
    )
    assert list(text_chart({"even": even, "half": half}, columns=18)) == [
        "█ forward  ▒ backward  ▒ backward, inputs  ░ backward, weights  · idle",
        "even",
        "  rank 0  ████····▒▒▒▒··▒▒▒▒ 33.3% idle",
        "  rank 1  ··██▒▒▒▒██▒▒▒▒···· 33.3% idle",
        "half",
        "  rank 0  ████▒▒▒▒░           0.0% idle",
    ]


def test_a_column_of_many_actions_shows_each_in_turn():
    events = [Event(0, 0, i, "F" if i % 2 else "B", i, i + 1.0) for i in range(40)]
    (row,) = [
        line.split()[2] for line in text_chart({"short": Timeline(1, tuple(events))}, columns=10) if "rank" in line
    ]
    assert (row.count("█"), row.count("▒")) == (5, 5)


def test_an_instant_is_drawn_too():
    assert list(text_chart({"nothing": Timeline(1, (Event(0, 0, 0, "F", 0.0, 0.0),))}))[2].startswith("  rank 0 ")
    assert ElementTree.fromstring(gantt({"nothing": Timeline(1, (Event(0, 0, 0, "F", 0.0, 0.0),))})) is not None
