"""Layers by their kind: what ranks of DDP and FSDP hold of them, and where a pipeline is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tools.pictures.canvas import WIDTH, Canvas
from tools.pictures.placed import Placed
from tools.pictures.ranks import PARTS

from shardwise.base.words import percent, size

GUTTER = 92.0
KINDS = {"attention": "c7", "recurrent": "c4", "feed-forward": "muted"}
_FROZEN = 0.35
PERIOD = 4  # layers that are drawn: those of a hybrid model repeat


@dataclass(frozen=True)
class Bar:
    """A block of a layer."""

    kind: str
    is_frozen: bool
    held: Sequence[float]
    """The share of it that each rank holds."""
    adapters: Sequence[float]
    """The share of its adapters that each rank holds; empty without any."""


@dataclass(frozen=True)
class Cell:
    """A model under a strategy: its first layers, and a line for what its ranks hold and send."""

    title: str
    bars: Sequence[Bar]
    lines: Sequence[tuple[str, str]]
    """Each with the part that it is about, or ""."""


def kinds_of(job: Placed) -> list[str]:
    """Return the kind of each layer."""
    layers = job.run.spec.layers
    return ["attention" if layer.attention else "recurrent" for layer in layers]


def cell_of(job: Placed, one: Placed, title: str) -> Cell:
    """Return a cell of a grid, beside `one` process with all of the model."""
    bars = []
    kinds, (chunk,) = kinds_of(job), job.shares[0].chunks
    for layer, kind in zip(job.run.spec.layers[:PERIOD], kinds, strict=False):
        for blocks, name in ((layer.mixers, kind), (layer.feed_forwards, "feed-forward")):
            first = chunk.alike.get(layer.name, layer.name)  # the one whose bytes are counted
            paths = tuple(f"{first}.{block.path}." for block in blocks)
            weights = [weight for weight in chunk.weights if weight.name.startswith(paths)]
            adapters = {w.name for w in weights if ".lora_" in w.name}
            base = [w for w in weights if w.name not in adapters]
            shares = [_held(job, one, names) for names in ({w.name for w in base}, adapters)]
            bars.append(Bar(name, not any(w.is_trained for w in base), *shares))
    (held,) = {sum(states.values()) for states in job.states({w.name for w in chunk.weights})}
    lines = [("", f"each holds {size(held)}"), ("", "sends in a step")]
    (leaving,) = job.leaving
    for (kind, _), num_bytes in sorted(leaving.items()):
        if num_bytes >= 2**10:
            what = "weights" if kind == "all-gather" else "gradients"
            lines.append((what, f"{what} {size(num_bytes)}"))
    return Cell(title, bars, lines)


def _held(job: Placed, one: Placed, names: set[str]) -> list[float]:
    whole = one.states(names)[0]["weights"]
    return [states["weights"] / whole for states in job.states(names)] if names else []


def draw_grid(title: str, rows: Sequence[tuple[str, Sequence[Cell]]], note: str) -> Canvas:
    """Draw rows of cells with the layers of two ranks each."""
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 4
    adapters, pitch, rank_width = PARTS["adapters"], 145.0, 60.0
    _legend(canvas, y, {**KINDS, "adapter": adapters})
    canvas.rect(0, y + 9, 8, 8, "c7")
    canvas.rect(10, y + 9, 8, 8, "c7", _FROZEN)
    canvas.text(24, y + 17, "trained, and pale: frozen")
    canvas.rect(210, y + 9, 8, 8, "line")
    canvas.text(223, y + 17, "on the other rank")
    y += 38
    for heading, cells in rows:
        y = canvas.paragraph(0, y, heading, "b") + 3
        for column, cell in enumerate(cells):
            x, top = pitch * column, y
            canvas.text(x, top, cell.title, fill="muted")
            for rank in range(2):
                left = x + rank * (rank_width + 9)
                canvas.text(left + rank_width / 2, top + 16, f"rank {rank}", anchor="middle")
                for number, bar in enumerate(cell.bars):
                    below = top + 21 + 9 * number + 3 * (number // 2)
                    _draw_bar(canvas, left, below, rank_width, bar, rank)
            for number, (part, line) in enumerate(cell.lines):
                below = top + 48 + 9 * len(cell.bars) + 15 * number
                if part:
                    canvas.rect(x, below - 8, 8, 8, PARTS[part])
                canvas.text(x + (12 if part else 0), below, line)
        y += 36 + 9 * len(cells[0].bars) + 15 * max(len(cell.lines) for cell in cells) + 24
    canvas.paragraph(0, y - 8, note, fill="muted")
    return canvas


def _draw_bar(canvas: Canvas, x: float, y: float, width: float, bar: Bar, rank: int) -> None:
    """Draw what a rank holds of a block, and at its right end, not to scale, of its adapters."""
    of_adapters = width / 5 if bar.adapters else 0.0
    parts = (
        (x, width - of_adapters, bar.held, KINDS[bar.kind], _FROZEN if bar.is_frozen else 1.0),
        (x + width - of_adapters, of_adapters, bar.adapters, PARTS["adapters"], 1.0),
    )
    canvas.rect(x, y, width, 8, "line", radius=0)
    for left, wide, held, fill, strength in parts:
        if held:
            begin = min(sum(held[:rank]), 1.0 - held[rank])
            canvas.rect(left + begin * wide, y, held[rank] * wide, 8, fill, strength, radius=0)


def _legend(canvas: Canvas, y: float, fills: dict[str, str]) -> None:
    for number, (name, fill) in enumerate(fills.items()):
        canvas.rect(105 * number, y - 7, 8, 8, fill)
        canvas.text(105 * number + 13, y + 1, name)


def strip_of(
    name: str, one: Placed, cuts: Sequence[tuple[str, Placed]]
) -> Callable[[Canvas, float], float]:
    """Return what draws a model's units as wide as they cost, and the cuts of pipelines below.

    `one`: one process with all of the model.
    """
    costs = [unit.seconds for unit in cuts[0][1].units]
    kinds = ["embedding", *kinds_of(one), "head"]
    (chunk,) = one.shares[0].chunks
    shares = []
    for weights in chunk.by_layer.values():
        trained, everything = (
            sum(prod(w.shape) for w in weights if w.is_trained or is_all) for is_all in (0, 1)
        )
        shares.append(trained / everything)
    scale, most = (WIDTH - GUTTER) / sum(costs), max(shares)
    edges = [GUTTER + scale * sum(costs[:number]) for number in range(len(costs) + 1)]
    fills = {"attention": "c7", "recurrent": "c4", "head": "c3", "embedding": "muted"}

    def draw(canvas: Canvas, y: float) -> float:
        y = canvas.paragraph(0, y, f"{name}: its layers, and two cuts by rank", "b") + 4
        _legend(canvas, y, {name: fill for name, fill in fills.items() if name in kinds[1:]})
        canvas.text(0, y + 24, "width: cost")
        canvas.text(0, y + 49, "trained share")
        for kind, share, (left, right) in zip(kinds, shares, pairwise(edges), strict=True):
            width = max(0.0, right - left - 0.8)
            canvas.rect(left, y + 10, width, 20, fills[kind], radius=0)
            high = 20 * share / most
            canvas.rect(left, y + 54 - high, width, high, PARTS["adapters"], radius=0)
        text = f"highest: {percent(most, 2)} of a layer's weights"
        canvas.text(GUTTER, y + 68, text, fill="muted")
        y += 76
        for way, job in cuts:
            assert job.split is not None
            canvas.text(0, y + 13, way)
            for low, high in pairwise(job.split.boundaries):
                left, right = edges[low], edges[high]
                canvas.rect(left, y, right - left - 2, 18, "line", 0.6, radius=0)
                of_all = percent((right - left) / (WIDTH - GUTTER))
                canvas.text((left + right) / 2, y + 13, of_all, anchor="middle")
            y += 22
        return y + 4

    return draw
