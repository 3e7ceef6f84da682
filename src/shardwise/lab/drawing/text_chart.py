"""Timelines as a chart of text, for the terminal."""

from collections.abc import Iterator, Mapping

from shardwise.base.schedule.orders import KIND_NAMES
from shardwise.base.schedule.timeline import Timeline

SHADES = {"F": "█", "B": "▒", "I": "▒", "W": "░", "idle": "·"}
"""The character of each kind of action."""
_BLANK = " "  # after the end of a step that is shorter than the longest one


def text_chart(timelines: Mapping[str, Timeline], columns: int = 58) -> Iterator[str]:
    """Yield the lines of a chart of timelines, by name, on one time axis of so many columns.

    Each rank has a row, and behind it the share of its time in which it is idle.
    """
    longest = max(timeline.seconds for timeline in timelines.values())
    column_seconds = longest / columns or 1.0
    kinds = {event.kind for timeline in timelines.values() for event in timeline.events}
    legend = [f"{SHADES[kind]} {name}" for kind, name in KIND_NAMES.items() if kind in kinds]
    yield "  ".join([*legend, f"{SHADES['idle']} idle"])
    for name, timeline in timelines.items():
        yield name
        for rank in range(timeline.num_ranks):
            row = _row(timeline, rank, columns, column_seconds)
            yield f"  rank {rank:<3}{row} {timeline.bubble(rank):5.1%} idle"


def _row(timeline: Timeline, rank: int, columns: int, column_seconds: float) -> str:
    """Return a character for each column: the one of which the row shows too little so far.

    So several short actions within one column get their turn in the next columns.
    """
    events = [event for event in timeline.events if event.rank == rank]
    spans = [(SHADES[event.kind], event.start, event.end) for event in events]
    spans += [(SHADES["idle"], start, end) for start, end in timeline.waits(rank)]
    row = ""
    # Seconds that passed with each shade, less those that the row shows of it.
    missing_seconds = dict.fromkeys((*SHADES.values(), _BLANK), 0.0)
    for column in range(columns):
        low, high = column * column_seconds, column * column_seconds + column_seconds
        inside: list[str] = []
        for shade, start, end in spans:
            seconds = min(end, high) - max(start, low)
            if seconds > 0.0:
                missing_seconds[shade] += seconds
                inside.append(shade)
        shade = max(inside, key=missing_seconds.__getitem__, default=_BLANK)
        missing_seconds[shade] -= column_seconds
        row += shade
    return row
