"""Spread over seeds: cells that differ in `training.seed` alone are one row of the report."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.base.records.cell import Axis
from shardwise.base.words import NOTHING, number, one_line, size
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.columns import last_loss, loss_text
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.names import named_values
from shardwise.lab.report.panels import MAX_NAME, Drawn, grid
from shardwise.lab.report.tables import Row

SEED = "training.seed"


@dataclass(frozen=True)
class Seeds:
    """Cells that differ in their seed alone."""

    name: str
    cells: list[Row]

    def values(self, read: Callable[[Row], float | None]) -> list[float]:
        """Return a figure of each cell that has one and is not wrong."""
        figures = [read(row) for row in self.cells if row.measured]
        return [value for value in figures if value is not None and math.isfinite(value)]

    @property
    def counted(self) -> str:
        """Return how many of its cells have figures: `3`, or `2 of 3`."""
        good = sum(row.measured for row in self.cells)
        return str(good) if good == len(self.cells) else f"{good} of {len(self.cells)}"

    @property
    def texts(self) -> list[str]:
        """Return the median and the range of each of FIGURES as text."""
        return [_spread(self.values(read), write) for _, read, write in FIGURES]


def _validation_loss(row: Row) -> float | None:
    return row.validation[-1][1] if row.validation else None


Figure = tuple[str, Callable[[Row], float | None], Callable[[float], str]]
LOSSES: tuple[Figure, ...] = (
    ("Last loss", last_loss, loss_text),
    ("Validation loss", _validation_loss, loss_text),
)
FIGURES: tuple[Figure, ...] = (
    *LOSSES,
    ("Tokens/s", lambda row: row.tokens_per_second, number),
    ("Peak memory", lambda row: row.peak_memory_bytes, size),
)
"""Columns of the cells: heading, figure, and its text."""


def _spread(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Return the median of some figures, and in brackets the smallest and the largest."""
    if not values:
        return NOTHING
    low, middle, high = map(write, (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} – {high})"


def varies_seed(axis: Axis) -> bool:
    """Return whether nothing but the seed changes along an axis."""
    return set(axis.keys) == {SEED}


def over_seeds(bench: BenchFolder, rows: Sequence[Row]) -> list[Seeds]:
    """Return the cells of each combination of values on all axes but that of the seed.

    The list is empty where no axis varies the seed alone.
    """
    axes = bench.sweep.axes
    seeds = {axis.name for axis in axes if varies_seed(axis) and len(axis.values) > 1}
    others = [axis for axis in axes if axis.name not in seeds]
    if not seeds:
        return []
    families: dict[tuple[str | None, ...], Seeds] = {}
    for row in rows:
        if not row.plan.control:
            key = tuple(row.plan.values.get(axis.name) for axis in others)
            name = named_values(row.plan, bench.sweep, others) or "all cells"
            families.setdefault(key, Seeds(name, [])).cells.append(row)
    return [*families.values()]


def spread(families: Sequence[Seeds]) -> Drawn:
    """Draw the last losses of the cells of each family, a mark for each seed."""
    shown = [figure for figure in LOSSES if any(family.values(figure[1]) for family in families)]
    height = max(1.6, 0.27 * len(families))
    figure, ((*panels,),) = grid(1, max(1, len(shown)), [height])
    for panel, (heading, read, _) in zip(panels, shown):
        panel.set_title(heading)
        for place, family in enumerate(families):
            values = family.values(read)
            if values:
                line: dict[str, Any] = {"color": colour("faint"), "linewidth": 1.2, "zorder": 1}
                panel.plot([min(values), max(values)], [place, place], **line)
                dots: dict[str, Any] = {
                    "color": colour("c1"),
                    "marker": "o",
                    "markersize": 5,
                    "alpha": 0.7,
                }
                panel.plot(values, [place] * len(values), linestyle="none", **dots)
                mark: dict[str, Any] = {"color": colour("ink"), "marker": "|", "markersize": 12}
                panel.plot(median(values), place, markeredgewidth=1.6, **mark)
            else:
                panel.text(0.02, place, "no figure", transform=panel.get_yaxis_transform())
        names = [
            one_line(family.name, MAX_NAME)
            + " (unchecked)" * any(cell.state == "unchecked" for cell in family.cells)
            for family in families
        ]
        panel.set_yticks(range(len(families)), names if panel is panels[0] else [""] * len(names))
        panel.tick_params(axis="y", labelcolor=colour("ink"))
        panel.set_ylim(max(2, len(families)) - 0.4, -0.6)
        panel.grid(visible=False, axis="y")
        panel.margins(x=0.12)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return Drawn(
        "seeds",
        "Spread over seeds",
        "A dot for each seed, a tick at the median, and a line over the range. Cells that differ "
        "in their layout alone have the same loss for the same seed up to rounding, so their dots "
        "nearly coincide; what lies between the dots of a row is what another seed does.",
        figure,
    )
