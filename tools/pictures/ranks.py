"""What each rank holds, and what moves between them: the diagram of a layout.

A strip stands for what one process would hold of a part; the coloured piece of it is what the rank
holds, and strips are as high as parts are large. Below, each message shows what its ranks have
before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.pictures.canvas import WIDTH, Canvas

from shardwise.base.words import size

GUTTER = 92.0
"""The width of the names on the left."""
COLUMNS = 4
"""Ranks side by side."""
PARTS = {
    "weights": "c1",
    "experts": "c1",
    "adapters": "c5",
    "gradients": "c2",
    "buckets": "c2",
    "optimizer": "c3",
    "activations": "c4",
}
"""The colours of what ranks hold and send, as in the figures of a report."""
_HIGHEST, _LOWEST = 18.0, 3.0  # strips
_WORDS = 106.0  # the left edge of texts beside the kind of a message
_PALE = 0.35


@dataclass(frozen=True)
class Held:
    """The bytes that each rank holds of a part."""

    part: str
    num_bytes: Sequence[int]
    """One entry for each rank."""
    whole: int
    """Of one process with the complete model."""
    pieces: Sequence[Sequence[tuple[float, float]]]
    """What of the complete part each rank holds: where pieces begin, and how long they are, in
    shares of it."""
    num_passing: int = 0
    """So many of a rank's pieces, the first ones, it holds for a while, and then keeps the rest."""


@dataclass(frozen=True)
class Holding:
    """What the ranks hold of a model."""

    title: str
    work: str
    """What differs between the ranks: rows, layers, ..."""
    works: Sequence[str]
    """Which of it each rank has."""
    parts: Sequence[Held]


@dataclass(frozen=True)
class Move:
    """Messages of one kind along one axis of the mesh."""

    kind: str
    part: str
    what: str
    sizes: str
    """Bytes, as text."""
    groups: Sequence[Sequence[int]]
    """The ranks that exchange them."""
    is_chain: bool = False
    """Whether each rank sends to the next one of its group."""


@dataclass(frozen=True)
class Ranks:
    """A layout to draw."""

    title: str
    holdings: Sequence[Holding]
    moves: Sequence[Move]
    note: str
    """What a step is."""


def draw(ranks: Ranks) -> Canvas:
    """Draw a layout."""
    canvas = Canvas()
    y = canvas.paragraph(0, 12, ranks.title, "h") + 3
    for holding in ranks.holdings:
        y = canvas.paragraph(0, y + 4, holding.title, "b", "muted") - 1
        y = _draw_holding(canvas, y, holding)
    y = canvas.paragraph(0, y + 8, "What moves in a step", "b", "muted") - 5
    for move in ranks.moves:
        y = _draw_move(canvas, y, move, len(ranks.holdings[0].works))
    notes = []
    if any(held.num_passing for holding in ranks.holdings for held in holding.parts):
        notes.append("pale in a strip: held until it is summed")
    kinds = {move.kind for move in ranks.moves}
    if kinds & {"all-reduce", "reduce-scatter"}:
        notes.append("pale in an all-reduce or a reduce-scatter: a partial sum")
    if "all-to-all" in kinds:
        notes.append("shades in an all-to-all: the rank that a piece comes from")
    for note in (*notes, ranks.note):
        y = canvas.paragraph(0, y + 8, note, fill="muted") - 8
    return canvas


def _columns(number: int) -> list[tuple[float, float]]:
    """Return the left edges and widths of columns beside the gutter."""
    pitch = (WIDTH - GUTTER + 8) / number
    return [(GUTTER + pitch * column, pitch - 8) for column in range(number)]


def _draw_holding(canvas: Canvas, y: float, holding: Holding) -> float:
    most = max(held.whole for held in holding.parts)
    num_ranks = len(holding.works)
    for first in range(0, num_ranks, COLUMNS):
        band = range(first, min(first + COLUMNS, num_ranks))
        canvas.text(0, y + 22, holding.work, fill="muted")
        for rank, (x, width) in zip(band, _columns(COLUMNS)):
            canvas.text(x + width / 2, y + 8, f"rank {rank}", "b", anchor="middle")
            work = holding.works[rank]
            canvas.text(x + width / 2, y + 22, work, fill="muted", anchor="middle")
        y += 28
        for held in holding.parts:
            height = max(_LOWEST, _HIGHEST * held.whole / most)
            canvas.rect(0, y + 3, 8, 8, PARTS[held.part])
            canvas.text(13, y + 11, held.part)
            for rank, (x, width) in zip(band, _columns(COLUMNS)):
                _draw_strip(canvas, x, y, width, height, held, rank)
            y += height + 20
        y += 6
    return y + 4


def _draw_strip(
    canvas: Canvas, x: float, y: float, width: float, height: float, held: Held, rank: int
) -> None:
    canvas.text(x + width / 2, y + 11, size(held.num_bytes[rank]), anchor="middle")
    canvas.rect(x, y + 15, width, height, "line", radius=0)
    for place, (start, share) in enumerate(held.pieces[rank]):
        opacity = _PALE if place < held.num_passing else 1.0
        if share:
            left, fill = x + start * width, PARTS[held.part]
            canvas.rect(left, y + 15, share * width, height, fill, opacity, radius=0)


def _draw_move(canvas: Canvas, y: float, move: Move, num_ranks: int) -> float:
    canvas.text(0, y + 11, move.kind, "b")
    y = canvas.paragraph(_WORDS, y + 11, move.what) - 6
    columns = _columns(num_ranks)
    if move.is_chain:
        y = _draw_sends(canvas, y, move, columns)
    else:
        tracks = _tracks(move.groups)
        if move.kind != "send":
            for rank, (x, width) in enumerate(columns):
                _draw_exchange(canvas, x, y, width, move, rank)
            y += 16
        for group, track in zip(move.groups, tracks, strict=True):
            middles = [columns[rank][0] + columns[rank][1] / 2 for rank in group]
            below = y + 5 * track
            canvas.line([(middles[0], below), (middles[-1], below)], PARTS[move.part])
            for middle in middles:
                canvas.dot(middle, below, PARTS[move.part])
        y += 5 * max(tracks)
    return canvas.paragraph(_WORDS, y + 16, move.sizes, fill="muted") - 4


def _draw_exchange(canvas: Canvas, x: float, y: float, width: float, move: Move, rank: int) -> None:
    """Draw the pieces of a tensor that a rank has before and after a message."""
    (group,) = (group for group in move.groups if rank in group)
    place, number, fill = group.index(rank), len(group), PARTS[move.part]
    tile = min(7.0, (width - 16) / 2 / number)
    left = x + width / 2 - 8 - number * tile
    right = x + width / 2 + 8
    canvas.line([(x + width / 2 - 5, y + 5), (x + width / 2 + 6, y + 5)], "muted", arrow=True)
    for piece in range(number):
        before, after = _strengths(move.kind, piece, place, number)
        for edge, strength in ((left, before), (right, after)):
            canvas.rect(edge + piece * tile, y, tile - 1, 10, "line", radius=0.5)
            if strength:
                canvas.rect(edge + piece * tile, y, tile - 1, 10, fill, strength, radius=0.5)


def _strengths(kind: str, piece: int, place: int, number: int) -> tuple[float, float]:
    """Return how strong the colour of a piece is before and after a message; 0: not there."""
    is_own, pale = float(piece == place), _PALE
    if kind == "all-to-all":  # a rank's pieces have a strength of their own
        return 1 - 0.7 * place / (number - 1), 1 - 0.7 * piece / (number - 1)
    return {
        "all-reduce": (pale, 1.0),
        "reduce-scatter": (pale, is_own),
        "all-gather": (is_own, 1.0),
    }[kind]


def _draw_sends(
    canvas: Canvas, y: float, move: Move, columns: Sequence[tuple[float, float]]
) -> float:
    """Draw arrows to the next rank, and below them those of the gradients on their way back."""
    tracks = _tracks(move.groups)
    for group, track in zip(move.groups, tracks, strict=True):
        top = y + 4 + 18 * track
        middles = [columns[rank][0] + columns[rank][1] / 2 for rank in group]
        for before, after in pairwise(middles):
            canvas.line([(before + 6, top), (after - 6, top)], "c4", arrow=True)
            canvas.line([(after - 6, top + 8), (before + 6, top + 8)], "c2", arrow=True)
        for middle in middles:
            canvas.rect(middle - 4, top - 3, 8, 14, "muted", radius=1)
    return y + 16 + 18 * max(tracks)


def _tracks(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the line on which each group is drawn, so that no two of one line overlap."""
    ends: list[int] = []
    tracks = []
    for group in groups:
        track = next((t for t, end in enumerate(ends) if end < group[0]), len(ends))
        ends[track:] = [group[-1], *ends[track + 1 :]]
        tracks.append(track)
    return tracks
