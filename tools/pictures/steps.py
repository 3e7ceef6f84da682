"""Diagrams of what happens step by step: pipelines, a ring, a prefix scan, pieces of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.pictures.canvas import WIDTH, Canvas

from shardwise.base.schedule.context import TokenSplit
from shardwise.base.schedule.orders import KIND_NAMES
from shardwise.base.schedule.timeline import Timeline
from shardwise.lab.drawing.gantt import COLOURS, IDLE

GUTTER = 92.0
_PALE = 0.35


@dataclass(frozen=True)
class Chart:
    """A step of a pipeline to draw."""

    heading: str
    title: str
    """Its name in a comparison with another chart."""
    timeline: Timeline
    contents: Sequence[str]
    """What each rank has, beside its row."""


def draw_pipelines(
    title: str,
    charts: Sequence[Sequence[Chart]],
    strip: Callable[[Canvas, float], float] | None = None,
) -> Canvas:
    """Draw charts one below the other; those of a group have one time axis.

    `strip` draws what is above the last group.
    """
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 4
    timelines = [chart.timeline for group in charts for chart in group]
    kinds = {event.kind for timeline in timelines for event in timeline.events}
    x = 0.0
    for kind, name in KIND_NAMES.items():
        if kind in kinds:
            canvas.rect(x, y - 6, 8, 8, COLOURS[kind])
            canvas.text(x + 13, y + 2, name)
            x += 110
    canvas.rect(x, y - 6, 8, 8, IDLE)
    canvas.text(x + 13, y + 2, "idle")
    if any(event.chunk >= t.num_ranks for t in timelines for event in t.events):
        canvas.rect(0, y + 10, 8, 8, COLOURS["F"], 0.75)
        canvas.text(13, y + 18, "paler: a rank's second stage")
        y += 16
    for group in charts:
        if strip is not None and group is charts[-1]:
            y = strip(canvas, y + 26)
        longest = max(chart.timeline.seconds for chart in group)
        for chart in group:
            less = 1 - chart.timeline.seconds / group[0].timeline.seconds
            text = f"idle {chart.timeline.bubble():.0%} of the time"
            if chart is not group[0]:
                text += f"; {less:.0%} less time than {group[0].title}"
            y = _draw_chart(canvas, y + 24, chart, text, longest)
        y += 4
    return canvas


def _draw_chart(canvas: Canvas, y: float, chart: Chart, text: str, longest: float) -> float:
    timeline, row, bar = chart.timeline, 17.0, 15.0
    y = canvas.paragraph(0, y, chart.heading, "b")
    canvas.text(0, y, "layers", fill="muted")
    y = canvas.paragraph(GUTTER, y, text, fill="muted") - 8
    scale = (WIDTH - GUTTER) / longest
    for rank, contents in enumerate(chart.contents):
        top = y + rank * row
        canvas.text(0, top + 12, contents)
        canvas.rect(GUTTER, top, timeline.seconds * scale, bar, IDLE, radius=0)
        events = [e for e in timeline.events if e.rank == rank and e.end > e.start]
        chunks = sorted({event.chunk for event in events})
        for event in events:
            left, width = GUTTER + event.start * scale, (event.end - event.start) * scale
            strength = 1 - 0.5 * chunks.index(event.chunk) / len(chunks)
            canvas.rect(left, top, width - 0.6, bar, COLOURS[event.kind], strength, radius=0)
            if width > 9:
                number = str(event.microbatch)
                canvas.text(left + width / 2, top + 12, number, "", "paper", "middle")
    return y + row * timeline.num_ranks


def draw_ring(title: str, num_ranks: int, notes: Sequence[str]) -> Canvas:
    """Draw an all-reduce around a ring: after each step, which ranks each piece is the sum of."""
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 6
    columns = [(GUTTER + 84 * rank, 74.0) for rank in range(num_ranks)]
    for rank, (x, width) in enumerate(columns):
        canvas.text(x + width / 2, y + 4, f"rank {rank}", "b", anchor="middle")
    first, *steps = ring_steps(num_ranks)
    y = _draw_pieces(canvas, y + 12, "at first", first, columns)
    for number, name in enumerate(("reduce-scatter", "all-gather")):
        y = canvas.paragraph(0, y + 17, name, "b") - 8
        canvas.text(GUTTER + 14, y - 7, notes[number], fill="muted")
        begin = number * (num_ranks - 1)
        for step, state in enumerate(steps[begin : begin + num_ranks - 1], start=1):
            y = _draw_pieces(canvas, y, f"after step {step}", state, columns)
    y = canvas.paragraph(0, y + 18, notes[2]) + 2
    everyone = frozenset(range(num_ranks))
    own, total, nothing = (
        [ranks] * num_ranks for ranks in (frozenset([0]), everyone, frozenset[int]())
    )
    others = [nothing] * (num_ranks - 1)
    from_first = [own, *others], [own] * num_ranks
    to_first = first.pieces, [total, *others]
    for name, pieces, note in zip(
        ("broadcast", "reduce"), (from_first, to_first), notes[3:], strict=True
    ):
        y = canvas.paragraph(0, y + 17, name, "b") - 8
        canvas.text(GUTTER + 14, y - 7, note, fill="muted")
        for label, of_ranks in zip(("at first", "at last"), pieces, strict=True):
            state = RingState(of_ranks, [None] * num_ranks)
            y = _draw_pieces(canvas, y, label, state, columns)
    y += 14
    canvas.paragraph(
        0,
        y,
        "The height of a piece: how many ranks it is the sum of. Framed: what "
        "the rank before has just sent, the last rank to the first.",
        fill="muted",
    )
    return canvas


@dataclass(frozen=True)
class RingState:
    """What ranks have of a tensor in as many pieces."""

    pieces: Sequence[Sequence[frozenset[int]]]
    """[rank, piece]: the ranks that it is the sum of."""
    arrived: Sequence[int | None]
    """The piece that each rank has just been sent."""


def ring_steps(num_ranks: int) -> Iterator[RingState]:
    """Yield the states of an all-reduce around a ring: at first, and after each of its steps.

    In every step each rank sends a piece to the next one: in the first half one that is the
    sum of more ranks than that rank's, in the second half a complete one.
    """
    ranks = range(num_ranks)
    pieces = [[frozenset([rank]) for _ in ranks] for rank in ranks]
    yield RingState([[*own] for own in pieces], [None] * num_ranks)
    for step in range(2 * (num_ranks - 1)):
        # Rank r first sends piece r, and then always what it was sent last.
        sent = [(rank - step) % num_ranks for rank in ranks]
        contents = [pieces[rank][sent[rank]] for rank in ranks]
        arrived = [sent[rank - 1] for rank in ranks]
        for rank in ranks:
            pieces[rank][arrived[rank]] |= contents[rank - 1]
        yield RingState([[*own] for own in pieces], arrived)


def _draw_pieces(
    canvas: Canvas, y: float, label: str, state: RingState, columns: Sequence[tuple[float, float]]
) -> float:
    high, number = 20.0, len(state.pieces)
    canvas.text(0, y + 14, label)
    for rank, (x, width) in enumerate(columns):
        tile = width / number
        for piece, added in enumerate(state.pieces[rank]):
            left, part = x + piece * tile, high * len(added) / number
            canvas.rect(left, y, tile - 2, high, "line", radius=0)
            strength = 1.0 if len(added) == number else 0.55
            canvas.rect(left, y + high - part, tile - 2, part, "c2", strength, radius=0)
            if state.arrived[rank] == piece:
                edges = [
                    (left, y),
                    (left + tile - 2, y),
                    (left + tile - 2, y + high),
                    (left, y + high),
                ]
                canvas.line([*edges, edges[0]], "ink", width=1.6)
        if state.arrived[rank] is not None and rank + 1 < number:
            canvas.line([(x + width - 1, y + 10), (x + width + 9, y + 10)], "muted", arrow=True)
    return y + high + 7


def draw_scan(title: str, tokens: Sequence[str], texts: dict[str, str]) -> Canvas:
    """Draw how recurrent layers pass states on: the halo of a convolution, and a prefix scan.

    `texts`: the lines beside `halo`, `scan`, `start` and `back`.
    """
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 6
    number = len(tokens)
    pitch = WIDTH / number
    middles = [pitch * (rank + 0.5) for rank in range(number)]
    for rank, middle in enumerate(middles):
        canvas.text(middle, y + 4, f"rank {rank}", "b", anchor="middle")
        canvas.rect(pitch * rank, y + 11, pitch - 2, 18, "c4", 1 - 0.5 * rank / number, radius=0)
        canvas.text(middle, y + 43, tokens[rank], fill="muted", anchor="middle")
    y += 64
    canvas.text(0, y, "convolution", "b")
    y = canvas.paragraph(0, y + 16, texts["halo"]) - 4
    for before, after in pairwise(middles):
        canvas.line([(before + 8, y), (after - 8, y)], "c4", arrow=True)
        canvas.line([(after - 8, y + 8), (before + 8, y + 8)], "c2", arrow=True)
    for middle in middles:
        canvas.rect(middle - 5, y - 4, 10, 16, "muted", radius=1)
    y += 34
    canvas.text(0, y, "recurrence: a prefix scan", "b")
    y = canvas.paragraph(0, y + 16, texts["scan"]) - 6
    for step, (distance, known) in enumerate(scan_rounds(number), start=1):
        canvas.text(0, y + 14, f"round {step}", fill="muted")
        y += 22
        for rank in range(number - distance):
            top = y + 9 * (rank % distance)
            end = middles[rank + distance] - 6
            canvas.line([(middles[rank], top), (end, top)], "c4", arrow=True)
            canvas.dot(middles[rank], top, "c4", 3)
        y += 9 * (distance - 1) + 8
        _draw_known(canvas, y, known, middles)
        y += 12
    y = canvas.paragraph(0, y + 18, texts["start"]) + 2
    canvas.paragraph(0, y, texts["back"], fill="muted")
    return canvas


def scan_rounds(num_ranks: int) -> Iterator[tuple[int, list[frozenset[int]]]]:
    """Yield the distance of each round of a prefix scan, and what ranks know after it.

    That are the ranks before each one of whose tokens it knows the map of the state.
    """
    known = [frozenset[int]() for _ in range(num_ranks)]
    distance = 1
    while distance < num_ranks:
        sent = [ranks | {rank} for rank, ranks in enumerate(known)]
        for rank in range(distance, num_ranks):
            known[rank] |= sent[rank - distance]
        yield distance, [*known]
        distance *= 2


def _draw_known(
    canvas: Canvas, y: float, known: Sequence[frozenset[int]], middles: Sequence[float]
) -> None:
    """Draw of which ranks each rank knows the map of the state."""
    for middle, ranks in zip(middles, known, strict=True):
        left = middle - 5.5 * len(known)
        for rank in range(len(known)):
            canvas.rect(left + 11 * rank, y, 10, 10, "line", radius=0)
            if rank in ranks:
                canvas.rect(
                    left + 11 * rank, y, 10, 10, "c4", 1 - 0.5 * rank / len(known), radius=0
                )


@dataclass(frozen=True)
class Way:
    """A way of attention over ranks to draw."""

    title: str
    cut: TokenSplit
    by_heads: bool
    gathers: bool
    sizes: str


def draw_attention(title: str, ways: Sequence[Way]) -> Canvas:
    """Draw which queries and keys each rank multiplies, where each has a part of the tokens."""
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 2
    for way in ways:
        y = canvas.paragraph(0, y + 10, way.title, "b") + 2
        for rank in range(way.cut.num_ranks):
            x, side = GUTTER + 84 * rank, 70.0
            canvas.text(x + side / 2, y, f"rank {rank}", fill="muted", anchor="middle")
            (_draw_heads if way.by_heads else _draw_keys)(canvas, x, y + 5, side, way, rank)
        if way.by_heads:
            canvas.text(0, y + 22, "tokens ↓", fill="muted")
            canvas.text(0, y + 37, "heads →", fill="muted")
        else:
            canvas.text(0, y + 22, "queries ↓", fill="muted")
            canvas.text(0, y + 37, "keys →", fill="muted")
        y = canvas.paragraph(0, y + (56 if way.by_heads else 92), way.sizes, fill="muted")
    y += 6
    legend = (
        ("c4", 1.0, "own tokens"),
        ("c7", 1.0, "sent by other ranks"),
        ("c7", 0.25, "pale, of either: after the queries, not seen"),
    )
    for fill, strength, name in legend:
        canvas.rect(0, y - 1, 8, 8, fill, strength)
        canvas.text(13, y + 7, name)
        y += 16
    return canvas


def _draw_keys(canvas: Canvas, x: float, y: float, side: float, way: Way, rank: int) -> None:
    """Draw the queries of a rank over all keys that are not after them."""
    cut, number = way.cut, way.cut.num_ranks * way.cut.chunks_per_rank
    owners = {chunk: r for r in range(cut.num_ranks) for chunk in cut.chunks(r)}
    tile = side / number
    canvas.rect(x, y, side, side, "line", 0.5, radius=0)
    for query in cut.chunks(rank):
        for key in range(number if way.gathers else query + 1):
            fill = "c4" if owners[key] == rank else "c7"
            strength = 1.0 if key <= query else 0.25
            place = x + key * tile, y + query * tile
            canvas.rect(*place, tile - 0.7, tile - 0.7, fill, strength, radius=0)


def _draw_heads(canvas: Canvas, x: float, y: float, side: float, way: Way, rank: int) -> None:
    """Draw the exchange: a part of the tokens of all heads, then all tokens of a part of them."""
    number, small = way.cut.num_ranks, 26.0
    tile = small / number
    for left in (x, x + side - small):
        canvas.rect(left, y, small, small, "line", radius=0)
    canvas.rect(x, y + rank * tile, small, tile, "c4", radius=0)
    canvas.rect(x + side - small + rank * tile, y, tile, small, "c7", radius=0)
    canvas.rect(x + side - small + rank * tile, y + rank * tile, tile, tile, "c4", radius=0)
    canvas.line(
        [(x + small + 3, y + small / 2), (x + side - small - 2, y + small / 2)], "muted", True
    )
