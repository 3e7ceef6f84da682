"""The look of the cells in figures: colours, markers and dashes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.base.records.cell import SweepRecord
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.names import is_number, named_values
from shardwise.lab.report.tables import Row

_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "h", "<", ">")
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)


@dataclass(frozen=True)
class Look:
    """The look of a cell, the same in every figure. Cells differ in more than colour."""

    name: str  # name that the colour and the marker stand for
    variant: str  # name that the dashes stand for
    colour: str
    marker: str
    dash: Any


def looks(sweep: SweepRecord, rows: Sequence[Row], apart_from: str = "") -> dict[str, Look]:
    """Return the look of each cell by its id.

    Colour and marker stand for the cell's value on the first compared axis, if possible one whose
    values are not numbers. Dashes stand for its values on the other compared axes. `apart_from` is
    an axis that the figure shows in another way.
    """
    varied = [axis for axis in sweep.axes if axis.compared and len(axis.values) > 1]
    compared = [axis for axis in varied if axis.name != apart_from]
    not_numbers = [axis for axis in compared if not is_number(axis.values[0])]
    first = (not_numbers or compared)[:1]
    rest = [axis for axis in compared if axis not in first]
    names = {row.plan.id: named_values(row.plan, sweep, first) for row in rows}
    variants = {row.plan.id: named_values(row.plan, sweep, rest) for row in rows}
    colour_of = {name: place for place, name in enumerate(dict.fromkeys(names.values()))}
    dash_of = {name: place for place, name in enumerate(dict.fromkeys(variants.values()))}
    return {
        cell: Look(
            name=names[cell],
            variant=variants[cell],
            colour=colour(_COLOURS[colour_of[names[cell]] % len(_COLOURS)]),
            marker=_MARKERS[colour_of[names[cell]] % len(_MARKERS)],
            dash=_DASHES[dash_of[variants[cell]] % len(_DASHES)],
        )
        for cell in names
    }
