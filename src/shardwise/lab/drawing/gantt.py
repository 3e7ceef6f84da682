"""Timelines as a Gantt chart, drawn by matplotlib: what each rank did when, on one time axis.

Each rank has a row and each action a bar with the number of its micro-batch. A rank's further
chunks are paler. Idle time is grey, and its share stands beside the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.base.schedule.orders import KIND_NAMES, Kind
from shardwise.base.schedule.timeline import Event, Timeline
from shardwise.base.words import second_unit
from shardwise.lab.drawing.svg import colour, drawing, svg_file, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

COLOURS: dict[Kind, str] = {"F": "c1", "B": "c2", "I": "c2", "W": "c3"}
"""The colour of each kind of action, by its name in the palette."""
IDLE = "line"
"""The colour of idle time."""

# Inches.
WIDE, NARROW = 9.0, 5.0
"""The width of the other figures of a report, and of a page on a phone, where no text is shrunk."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.62, 0.88, 0.16, 0.34
_LEGEND = 0.2  # a line of it
_TITLE, _ROW, _BAR, _GAP = 0.46, 0.25, 0.21, 0.1
_DIGIT = 0.075  # a digit of a micro-batch's number


@dataclass(frozen=True)
class _Scale:
    """The time axis, which is as long as the longest step."""

    unit_seconds: float
    unit_name: str
    length: float  # units of time
    inches: float

    @classmethod
    def of(cls, timelines: Mapping[str, Timeline], width: float = WIDE) -> _Scale:
        """Choose the unit in which the longest step is read best; `width` is the chart's."""
        longest = max(timeline.seconds for timeline in timelines.values())
        unit_seconds, name = second_unit(longest)
        return cls(unit_seconds, name, longest / unit_seconds or 1.0, width - _LEFT - _RIGHT)

    def text(self, seconds: float) -> str:
        """Return a time with its unit."""
        return f"{seconds / self.unit_seconds:.4g} {self.unit_name}"


def gantt_svg(timelines: Mapping[str, Timeline], name: str, predicted: Collection[str] = ()) -> str:
    """Return a chart of timelines, by their titles, as an `<svg>` element.

    `name`: see `svg_of`; `predicted`: see `draw_gantt`. UserError where matplotlib is missing.
    """
    with drawing():
        return svg_of(draw_gantt(timelines, predicted), name, title=_title(timelines))


def gantt_file(timelines: Mapping[str, Timeline], width: float = WIDE) -> str:
    """Return the chart as an SVG file; UserError where matplotlib is missing."""
    with drawing():
        figure = draw_gantt(timelines, ("simulated",), width)
        return svg_file(figure, "gantt", title=_title(timelines))


def _title(timelines: Mapping[str, Timeline]) -> str:
    """Return what a screen reader says of a chart."""
    scale = _Scale.of(timelines)
    return "; ".join(
        f"{title}: {scale.text(timeline.seconds)}, bubble {timeline.bubble():.1%}"
        for title, timeline in timelines.items()
    )


def draw_gantt(
    timelines: Mapping[str, Timeline], predicted: Collection[str] = (), width: float = WIDE
) -> Figure:
    """Draw the chart, `width` inches wide; call it inside `drawing()`.

    `predicted`: the titles of timelines that are not compared with the longest of the others.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    scale = _Scale.of(timelines, width)
    heights = [_TITLE + _ROW * timeline.num_ranks + _GAP for timeline in timelines.values()]
    legend = _legend(timelines)
    columns = min(len(legend), round(width / 1.8))
    body = sum(heights)
    height = body + _TOP + _LEGEND * ceil(len(legend) / columns) + _BOTTOM
    figure = Figure(figsize=(width, height))
    place = _LEFT / width, _BOTTOM / height, scale.inches / width, body / height
    axes = figure.add_axes(place)
    axes.set(xlim=(0.0, scale.length), ylim=(body, 0.0))  # y is in inches, from the top
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(round(scale.inches)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} {scale.unit_name}")
    labels: dict[float, str] = {}
    top = 0.0
    compared = [t.seconds for title, t in timelines.items() if title not in predicted]
    for (title, timeline), block in zip(timelines.items(), heights, strict=True):
        longest = 0.0 if title in predicted else max(compared)
        _write_title(axes, title, timeline, longest, top, scale)
        for rank in range(timeline.num_ranks):
            middle = top + _TITLE + _ROW * (rank + 0.5)
            labels[middle] = f"rank {rank}"
            _draw_rank(axes, timeline, rank, middle, scale)
        top += block
    axes.set_yticks([*labels], [*labels.values()])
    figure.legend(
        handles=legend,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.4,
        borderpad=0.0,
        ncols=columns,
        handlelength=1.2,
        columnspacing=1.4,
    )
    return figure


def _write_title(
    axes: Axes, title: str, timeline: Timeline, longest: float, top: float, scale: _Scale
) -> None:
    """Write above a timeline its title, then its length and how much less than the longest it is.

    `longest` is in seconds, and 0 where there is nothing to compare it with.
    """
    share = timeline.seconds / longest if longest else 0.0
    gain = f", {1 - share:.1%} less time" if 0.0 < share < 1.0 else ""
    summary = f"{scale.text(timeline.seconds)}{gain}, bubble {timeline.bubble():.1%}"
    axes.text(0.0, top + 0.3 * _TITLE, title, va="center", fontsize=9.5, weight="bold")
    axes.text(0.0, top + 0.7 * _TITLE, summary, va="center", fontsize=8.5)


def _draw_rank(axes: Axes, timeline: Timeline, rank: int, y: float, scale: _Scale) -> None:
    """Draw the row of a rank: its idle time, its actions on it, and the idle share behind it."""
    length, row = timeline.seconds / scale.unit_seconds, (y - _BAR / 2, _BAR)
    axes.broken_barh([(0.0, length)], row, facecolors=colour(IDLE), linewidth=0)
    events = [event for event in timeline.events if event.rank == rank]
    chunks = sorted({event.chunk for event in events})
    spans: dict[tuple[int, Kind], list[tuple[float, float]]] = {}
    for event in events:
        if event.end > event.start:
            spans.setdefault((event.chunk, event.kind), []).append(_span(event, scale))
    for (chunk, kind), bars in spans.items():
        strength = 1 - 0.55 * chunks.index(chunk) / len(chunks)
        fill = colour(COLOURS[kind])
        axes.broken_barh(bars, row, facecolors=fill, alpha=strength, linewidth=0)
    _write_numbers(axes, events, y, scale)
    axes.annotate(
        f"{timeline.bubble(rank):.1%} idle",
        (length, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour("muted"),
        annotation_clip=False,
    )


def _span(event: Event, scale: _Scale) -> tuple[float, float]:
    """Return the begin and width of a bar. A gap, thinner than any bar, parts it from the next."""
    width = (event.end - event.start) / scale.unit_seconds
    return event.start / scale.unit_seconds, width - min(0.0008 * scale.length, 0.2 * width)


def _write_numbers(axes: Axes, events: Sequence[Event], y: float, scale: _Scale) -> None:
    """Write the number of its micro-batch into each bar that is wide enough for it."""
    digits = max((len(str(event.microbatch)) for event in events), default=1)
    for event in events:
        start, end = event.start / scale.unit_seconds, event.end / scale.unit_seconds
        if (end - start) / scale.length * scale.inches > _DIGIT * digits + 0.04:
            axes.text(
                (start + end) / 2,
                y,
                str(event.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color=colour("paper"),
            )


def _legend(timelines: Mapping[str, Timeline]) -> list[Patch]:
    """Return the colours with their names."""
    from matplotlib.patches import Patch

    kinds = {event.kind for timeline in timelines.values() for event in timeline.events}
    names = {kind: name for kind, name in KIND_NAMES.items() if kind in kinds}
    entries = [Patch(color=colour(COLOURS[kind]), label=name) for kind, name in names.items()]
    entries.append(Patch(color=colour(IDLE), label="idle"))
    if any(event.chunk >= t.num_ranks for t in timelines.values() for event in t.events):
        label = "paler: further chunks of a rank"
        entries.append(Patch(color=colour("c1"), alpha=0.5, label=label))
    return entries
