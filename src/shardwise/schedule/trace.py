"""Timelines to look at: a trace for Perfetto or chrome://tracing, a Gantt chart as SVG, and one in plain text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from shardwise.schedule.orders import Kind
from shardwise.schedule.simulate import Event, Timeline

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}

# Light and dark; a page that has the report's palette sets the variable, and its own colours are taken.
_COLOURS = {
    "F": ("c1", "#2a6fb0", "#6aaee8"),
    "B": ("c2", "#d67a00", "#f5ab4a"),
    "I": ("c2", "#d67a00", "#f5ab4a"),
    "W": ("c3", "#0e8f7e", "#4cc9b6"),
    "idle": ("line", "#dadee4", "#363d47"),
    "ink": ("ink", "#1b1f24", "#e9ecef"),
    "muted": ("muted", "#5a6472", "#a3adba"),
    "paper": ("paper", "#ffffff", "#15181d"),
}
_SHADES = {"F": "█", "B": "▒", "I": "▒", "W": "░", "idle": "·"}
_WIDTH, _LEFT, _RIGHT = 960.0, 64.0, 92.0
_ROW, _BAR = 26.0, 22.0


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Trace event JSON: a process for each timeline, a track for each rank and one for its waits, microseconds."""
    events: list[dict[str, object]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for rank in range(timeline.num_ranks):
            for tid, track in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} waits")):
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        events += [
            _span(pid, 2 * event.rank, f"{event.kind}{event.microbatch}", NAMES[event.kind], event.start, event.end)
            | {"args": {"chunk": event.chunk, "microbatch": event.microbatch}}
            for event in timeline.events
        ]
        events += [
            _span(pid, 2 * rank + 1, "wait", "wait", start, end)
            for rank in range(timeline.num_ranks)
            for start, end in timeline.waits(rank)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _span(pid: int, tid: int, name: str, category: str, start: float, end: float) -> dict[str, object]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def pack(timeline: Timeline) -> list[str]:
    """A timeline in few bytes: for each rank a line of `kind chunk micro-batch start end`, in whole microseconds."""
    return [
        ", ".join(
            f"{event.kind} {event.chunk} {event.microbatch} {event.start * 1e6:.0f} {event.end * 1e6:.0f}"
            for event in timeline.events
            if event.rank == rank
        )
        for rank in range(timeline.num_ranks)
    ]


def unpack(lines: Sequence[str]) -> Timeline:
    """The timeline that `pack` told; ValueError where it is none."""
    events = []
    for rank, line in enumerate(lines):
        for told in line.split(", "):
            letter, chunk, microbatch, start, end = told.split(" ")
            (kind,) = (kind for kind in NAMES if kind == letter)
            events.append(Event(rank, int(chunk), int(microbatch), kind, int(start) / 1e6, int(end) / 1e6))
    return Timeline(len(lines), tuple(events))


def gantt(timelines: Mapping[str, Timeline], standalone: bool = True) -> str:
    """Timelines above each other on one time axis, as an `<svg>` element.

    A row for each rank, a bar for each action with the number of its micro-batch; a rank's further chunks are paler,
    idle time is grey, and its share stands beside the row. `standalone`: follow the theme of whoever shows the file;
    otherwise that of the page that it is put into.
    """
    longest = max(timeline.seconds for timeline in timelines.values()) or 1.0
    body: list[str] = [*_legend(timelines)]
    top = 40.0
    for name, timeline in timelines.items():
        body += _rows(name, timeline, top, longest)
        top += 30.0 + timeline.num_ranks * _ROW + 14.0
    body += _axis(longest, top)
    height = top + 42.0
    label = "; ".join(
        f"{name}: {_seconds(t.seconds, longest)}, bubble {t.bubble():.1%}" for name, t in timelines.items()
    )
    theme = "color-scheme:light dark;" if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" style="{theme}max-width:100%;background:{_colour("paper")}" '
        f'font-family="var(--font,system-ui,sans-serif)" font-size="12" width="{_WIDTH:g}" height="{height:g}">'
        + "".join(body)
        + "</svg>"
    )


def text_chart(timelines: Mapping[str, Timeline], columns: int = 58) -> Iterator[str]:
    """Timelines as lines of text, on one time axis of so many columns: a row for each rank, and its idle share."""
    width = max(timeline.seconds for timeline in timelines.values()) / columns or 1.0
    kinds = {"idle", *(event.kind for timeline in timelines.values() for event in timeline.events)}
    yield "  ".join(f"{_SHADES[kind]} {name}" for kind, name in (*NAMES.items(), ("idle", "idle")) if kind in kinds)
    for name, timeline in timelines.items():
        yield name
        for rank in range(timeline.num_ranks):
            spans = [(_SHADES[event.kind], event.start, event.end) for event in timeline.events if event.rank == rank]
            spans += [(_SHADES["idle"], start, end) for start, end in timeline.waits(rank)]
            row, owed = "", dict.fromkeys((*_SHADES.values(), " "), 0.0)
            for low in (column * width for column in range(columns)):
                within = [(shade, min(end, low + width) - max(start, low)) for shade, start, end in spans]
                for shade, seconds in within:
                    owed[shade] += max(0.0, seconds)
                # Of what is within, that of which the row shows too little so far.
                row += max((shade for shade, seconds in within if seconds > 0), key=owed.__getitem__, default=" ")
                owed[row[-1]] -= width
            yield f"  rank {rank:<3}{row} {timeline.bubble(rank):5.1%} idle"


def _rows(name: str, timeline: Timeline, top: float, longest: float) -> Iterator[str]:
    """A timeline's title, and its ranks."""
    width = _place(timeline.seconds, longest) - _LEFT
    digits = len(str(max(event.microbatch for event in timeline.events)))
    gain = f", {1 - timeline.seconds / longest:.1%} less time" if timeline.seconds < longest else ""
    yield _text(_LEFT, top + 16, name, 'font-weight="bold" font-size="13"')
    told = f"{_seconds(timeline.seconds, longest)}{gain}, bubble {timeline.bubble():.1%}"
    yield _text(_WIDTH - _RIGHT, top + 16, told, 'text-anchor="end"')
    for rank in range(timeline.num_ranks):
        y = top + 28.0 + rank * _ROW
        yield _text(_LEFT - 8, y + 15, f"rank {rank}", 'text-anchor="end"', "muted")
        yield _rectangle(_LEFT, y, width, "idle")
        events = [event for event in timeline.events if event.rank == rank]
        chunks = sorted({event.chunk for event in events})
        for event in events:
            yield from _bar(event, y, longest, digits, chunks.index(event.chunk) / len(chunks))
        yield _text(_LEFT + width + 8, y + 15, f"{timeline.bubble(rank):.1%} idle", "", "muted")


def _bar(event: Event, y: float, longest: float, digits: int, pale: float) -> Iterator[str]:
    x, width = _place(event.start, longest), _place(event.end, longest) - _place(event.start, longest)
    if width <= 0.0:
        return
    lasted = _seconds(event.end - event.start, longest)
    told = f"{NAMES[event.kind]} of micro-batch {event.microbatch}, chunk {event.chunk}: {lasted}"
    # The gap between bars is the idle time's colour, so it is thinner than any bar.
    yield _rectangle(x, y, width - min(0.6, width * 0.2), event.kind, f'fill-opacity="{1 - 0.55 * pale:.2f}"', told)
    if width > 6.0 * digits + 3.0:
        yield _text(x + width / 2, y + 15, str(event.microbatch), 'text-anchor="middle" font-size="10"', "paper")


def _legend(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    kinds = {event.kind for timeline in timelines.values() for event in timeline.events}
    several = any(event.chunk >= t.num_ranks for t in timelines.values() for event in t.events)
    x = _LEFT
    for key, name in [*((kind, name) for kind, name in NAMES.items() if kind in kinds), ("idle", "idle")]:
        yield f'<rect x="{x:g}" y="12" width="14" height="14" rx="2" fill="{_colour(key)}"/>'
        yield _text(x + 20, 24, name)
        x += 44.0 + 6.6 * len(name)
    yield _text(x, 24, "paler: further chunks of a rank" if several else "", "", "muted")


def _axis(longest: float, top: float) -> Iterator[str]:
    step = _nice(longest / 8)
    for tick in range(int(longest / step * (1 + 1e-9)) + 1):
        x = _place(tick * step, longest)
        yield f'<path d="M{x:.2f} {top:g}v5" stroke="{_colour("muted")}"/>'
        yield _text(x, top + 19, _seconds(tick * step, longest), 'text-anchor="middle"', "muted")
    yield f'<path d="M{_LEFT:g} {top:g}H{_WIDTH - _RIGHT:g}" stroke="{_colour("muted")}"/>'


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _place(seconds: float, longest: float) -> float:
    return _LEFT + seconds / longest * (_WIDTH - _LEFT - _RIGHT)


def _seconds(seconds: float, longest: float) -> str:
    """In the unit of the longest time of the chart."""
    unit, name = (1.0, "s") if longest >= 1.0 else (1e-3, "ms") if longest >= 1e-3 else (1e-6, "µs")
    return f"{seconds / unit:.4g} {name}"


def _colour(key: str) -> str:
    name, light, dark = _COLOURS[key]
    return f"var(--{name},light-dark({light},{dark}))"


def _rectangle(x: float, y: float, width: float, key: str, more: str = "", told: str = "") -> str:
    title = f"><title>{escape(told)}</title></rect>" if told else "/>"
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{_BAR:g}"'
    return f'<rect {place} fill="{_colour(key)}" {more}{title}'


def _text(x: float, y: float, text: str, more: str = "", key: str = "ink") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{_colour(key)}" {more}>{escape(text)}</text>'
