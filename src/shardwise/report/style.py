"""How the cells look in figures: colours, markers, dashes and hatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.drawing.svg import colour
from shardwise.records.cell import SweepRecord
from shardwise.report.tables import Row
from shardwise.report.words import is_number, named_values

_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "h", "<", ">")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "oo", "++")


@dataclass(frozen=True)
class Look:
    """How a cell is drawn in every figure: not by colour alone."""

    name: str  # what the colour and the marker stand for
    variant: str  # what the dashes stand for
    colour: str
    marker: str
    dash: Any


def looks(sweep: SweepRecord, rows: Sequence[Row], apart_from: str = "") -> dict[str, Look]:
    """Cell -> its look: colour and marker by its value on the first compared axis of names, dashes by the others.

    `apart_from`: an axis that the figure shows in another way.
    """
    compared = [axis for axis in sweep.axes if axis.compared and len(axis.values) > 1 and axis.name != apart_from]
    named = [axis for axis in compared if not is_number(axis.values[0])]
    first, rest = (named + compared)[:1], [axis for axis in compared if axis not in (named + compared)[:1]]
    names: list[str] = []
    variants: list[str] = []
    found = {}
    for row in rows:
        name, variant = named_values(row.plan, sweep, first), named_values(row.plan, sweep, rest)
        for known, value in ((names, name), (variants, variant)):
            if value not in known:
                known.append(value)
        index = names.index(name)
        found[row.plan.id] = Look(
            name,
            variant,
            colour(_COLOURS[index % len(_COLOURS)]),
            _MARKERS[index % len(_MARKERS)],
            _DASHES[variants.index(variant) % len(_DASHES)],
        )
    return found
