"""The figure of experts' loads: what each expert of each layer was given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from shardwise.base.words import one_line
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.panels import MAX_NAME, Drawn, Groups, grid, set_title
from shardwise.lab.report.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
"""Panels side by side."""
EQUAL = 0.01
"""Shares over the mean that differ by less are drawn once."""
CAPTION = (
    "Each line is a layer: the tokens of its experts over their mean, in all steps, from the "
    "expert with most to the one with fewest. Equal loads are the dashed line at 1. Cells whose "
    "experts were given the same are drawn once; record.json has the numbers by expert."
)

Loads = list[list[float]]
"""The tokens of each expert over the mean, by layer."""


def shares(groups: Groups) -> Drawn:
    """Draw the loads of experts of each group's cells, once where they are the same."""
    shown = [(title, *one) for title, cells in groups for one in _distinct(cells)]
    num_rows = -(-len(shown) // COLUMNS)
    figure, panels = grid(num_rows, COLUMNS, [2.0] * num_rows)
    places = [panel for row in panels for panel in row]
    for panel, (title, cells, loads) in zip(places, shown):
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        set_title(panel, f"{one_line(cells[0].name, MAX_NAME - len(others))}{others}", title)
        _draw(panel, loads)
    for panel in places[len(shown) :]:
        panel.set_visible(False)
    return Drawn("experts", "Load of each expert", CAPTION, figure)


def _distinct(cells: Sequence[Row]) -> list[tuple[list[Row], Loads]]:
    """Return the loads that differ, with the cells that have them."""
    distinct: list[tuple[list[Row], Loads]] = []
    for row in cells:
        if row.routing is None:
            continue
        loads = [[share * len(layer) for share in layer] for layer in row.routing.share]
        alike = next((rows for rows, others in distinct if _are_equal(loads, others)), None)
        if alike is None:
            distinct.append(([row], loads))
        else:
            alike.append(row)
    return distinct


def _are_equal(loads: Loads, others: Loads) -> bool:
    if [*map(len, loads)] != [*map(len, others)]:
        return False
    pairs = zip(chain.from_iterable(loads), chain.from_iterable(others), strict=True)
    return all(abs(one - other) < EQUAL for one, other in pairs)


def _draw(panel: Axes, loads: Loads) -> None:
    from matplotlib.ticker import MaxNLocator

    for layer in loads:
        numbers = sorted(layer, reverse=True)
        panel.plot(range(1, len(numbers) + 1), numbers, color=colour("c1"), linewidth=1, alpha=0.6)
    panel.axhline(1, color=colour("muted"), linewidth=0.9, dashes=(4, 2), zorder=0.6)
    panel.set_ylim(0, 1.1 * max((max(layer, default=0.0) for layer in loads), default=0.0) or 1.0)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlabel("expert, by load")
