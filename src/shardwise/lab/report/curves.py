"""Curves: numbers over the steps, as routing; speed and memory along an axis of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.base.records.cell import Axis
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.learned import changes_losses, last_and_best
from shardwise.lab.report.names import axis_name, named_values
from shardwise.lab.report.panels import (
    Drawn,
    Groups,
    comma_ticks,
    grid,
    legend,
    peak_in,
    peak_unit,
    set_title,
    speed,
)
from shardwise.lab.report.style import Look, colour, looks
from shardwise.lab.report.tables import Row, number_of, scaling_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AGAINST = "against-"
"""The beginning of the names of figures along an axis of numbers."""
ROUTING_PANELS = (
    ("router_max_over_mean", "Busiest expert ÷ mean"),
    ("router_entropy", "Entropy ÷ that of equal loads"),
    ("router_dropped", "Share of tokens dropped"),
)
ROUTING_CAPTION = (
    "How evenly routers gave tokens to experts in every step: the tokens of the busiest expert "
    "over the mean, in the layer where that is most; the entropy of the loads over that of equal "
    "loads, as the mean of the layers; and the share of tokens that model.expert_capacity dropped."
)
PAIRS_PANELS = (
    ("rewards/chosen", "Reward of chosen answers"),
    ("rewards/rejected", "Reward of rejected answers"),
    ("rewards/accuracies", "Share with chosen ahead"),
    ("kl", "KL estimate"),
)
PAIRS_CAPTION = (
    "Means over every step: the rewards of chosen and of rejected answers (kto: of desirable and "
    "undesirable ones), and the share of pairs in which the chosen answer has the larger one, or "
    "(kto) the estimate of the divergence that rewards are compared with. A reward is "
    "preference.beta times how much more likely an answer is than by the reference, or "
    "(orpo, simpo) times the mean log-probability of its tokens."
)
AGAINST_CAPTION = (
    "Cells without a figure are left out of the lines; the table of all cells has the reason. "
    "Markers with a hole are unchecked cells."
)
PROCESSES = "processes"
"""The name of an axis that sets the number of processes."""
WRONG: dict[str, Any] = {
    "color": colour("bad"),
    "linestyle": (0, (4, 1.5)),
    "linewidth": 2.2,
    "marker": "x",
    "markersize": 6,
}
"""The loss curve of a wrong cell."""
CONTROL: dict[str, Any] = {
    "color": colour("muted"),
    "linestyle": (0, (1, 1.5)),
    "linewidth": 1.4,
    "marker": "1",
    "markersize": 7,
}
"""The loss curve of a noise control."""


# ----------------------------------------------------------------------------- over the steps


def draw_steps(
    panel: Axes, cells: Sequence[Row], look: dict[str, Look], read: Callable[[Row], Sequence[float]]
) -> None:
    """Draw a number of each step. Each curve has about six markers, so that none covers another."""
    from matplotlib.ticker import MaxNLocator

    for index, row in enumerate(cells):
        numbers = read(row)
        steps = range(1, len(numbers) + 1)
        marker_distance = max(1, len(steps) // 6)
        first_marker = index % marker_distance
        style = line_style(row, look[row.plan.id])
        panel.plot(steps, numbers, markevery=(first_marker, marker_distance), **style)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set_xlabel("step")


def routing(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw over the steps how evenly the routers of each group's cells gave tokens to experts."""
    figure = _over_steps(groups, look, ROUTING_PANELS, routing_steps)
    return Drawn("routing", "Loads of experts", ROUTING_CAPTION, figure)


def rewards(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw over the steps the rewards of both sides of pairs of answers."""
    figure = _over_steps(groups, look, PAIRS_PANELS, pairs_steps)
    return Drawn("rewards", "Pairs of answers", PAIRS_CAPTION, figure)


def _over_steps(
    groups: Groups,
    look: dict[str, Look],
    names: Sequence[tuple[str, str]],
    steps_of: Callable[[Row], Mapping[str, Sequence[float]]],
) -> Figure:
    """Draw the numbers of these names, in a row of panels for each group that has any."""
    shown = [
        (title, with_any) for title, cells in groups if (with_any := [*filter(steps_of, cells)])
    ]
    has = {name for _, cells in shown for row in cells for name in steps_of(row)}
    names = [panel for panel in names if panel[0] in has]
    figure, panels = grid(len(shown), len(names), [2.0] * len(shown))
    for (title, cells), group_panels in zip(shown, panels, strict=True):
        for panel, (name, quantity) in zip(group_panels, names, strict=True):
            set_title(panel, quantity, title if panel is group_panels[0] else "")
            drawn = {row.plan.id: steps_of(row).get(name, ()) for row in cells}
            draw_steps(panel, cells, look, lambda row, drawn=drawn: drawn[row.plan.id])
            numbers = [n for line in drawn.values() for n in line if math.isfinite(n)]
            if min(numbers, default=0.0) >= 0:
                panel.set_ylim(0, 1.1 * max(numbers, default=0.0) or 1.0)
    legend(figure, [row for _, cells in shown for row in cells], look, {})
    return figure


def routing_steps(row: Row) -> Mapping[str, Sequence[float]]:
    """Return the numbers of routers of a cell, by name."""
    return row.routing.steps if row.routing else {}


def pairs_steps(row: Row) -> Mapping[str, Sequence[float]]:
    """Return the numbers of pairs of answers of a cell, by name."""
    return row.figures.pairs if row.figures else {}


def line_style(row: Row, look: Look) -> dict[str, Any]:
    """Return the style of a cell's curve."""
    if row.state == "wrong":
        return WRONG
    if row.plan.control:
        return CONTROL
    style: dict[str, Any] = {"color": look.colour, "marker": look.marker}
    if row.is_reference:
        return style | {"linestyle": "solid", "linewidth": 4.0, "alpha": 0.4}
    return style | {"linestyle": look.dash, "linewidth": 1.3, "markersize": 4.5}


# --------------------------------------------------------------------- along an axis of numbers


def against(bench: BenchFolder, axis: Axis, rows: Sequence[Row]) -> Drawn:
    """Draw throughput and peak memory along an axis of numbers; losses where it changes these.

    There is a line for each combination of values on the other compared axes, and a pair of panels
    for each combination on the axes that are not compared.
    """
    cells = [row for row in rows if not row.plan.control]
    look = looks(bench.sweep, cells, apart_from=axis.name)
    by_title = _lines_by_title(bench, axis, cells, look)
    figure, panels = grid(len(by_title), 2, [2.7] * len(by_title))
    unit, unit_name = peak_unit(rows)
    name = PROCESSES if "nproc" in axis.keys else axis_name(axis)
    quantities = [("Throughput, tokens/s", speed), (f"Peak memory, {unit_name}", peak_in(unit))]
    if is_of_losses := changes_losses(axis):
        kind, losses = last_and_best(cells)
        quantities = [
            (f"{name} {kind}", partial(_loss, losses, place))
            for place, name in enumerate(("Last", "Lowest"))
        ]
    ticks = sorted({number_of(axis, row) or 0.0 for row in cells})
    for (title, lines), (left, right) in zip(by_title.items(), panels, strict=True):
        for panel, (quantity, read) in zip((left, right), quantities, strict=True):
            set_title(panel, quantity, title if panel is left else "")
            for style, line_rows in lines.items():
                _draw_line(panel, axis, line_rows, style, read)
        for line_rows in lines.values():
            if name == PROCESSES:
                _draw_ideal(left, axis, line_rows, ticks[-1])
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{value:,g}" for value in ticks])
            panel.set_xlabel(name)
            if not is_of_losses:
                panel.set_ylim(bottom=0)
                comma_ticks(panel.yaxis)
    legend(figure, cells, look, {})
    file_name = AGAINST + "".join(c if c.isalnum() else "-" for c in axis.name)
    caption = AGAINST_CAPTION
    if name == PROCESSES:
        caption += f" The thin dashes show ideal {scaling_kind(bench.sweep)} scaling."
    return Drawn(file_name, f"Against {name}", caption, figure)


def _lines_by_title(
    bench: BenchFolder, axis: Axis, cells: Sequence[Row], look: dict[str, Look]
) -> dict[str, dict[Look, list[Row]]]:
    """Return the cells of each line by its look, grouped by the title of their pair of panels."""
    others = [other for other in bench.sweep.axes if other.name != axis.name]
    separating = [other for other in others if not other.compared]
    by_title: dict[str, dict[Look, list[Row]]] = {}
    for row in cells:
        title = named_values(row.plan, bench.sweep, separating)
        lines = by_title.setdefault(title, {})
        lines.setdefault(look[row.plan.id], []).append(row)
    return by_title


def _loss(losses: dict[str, tuple[float, float]], place: int, row: Row) -> float | None:
    return losses[row.plan.id][place] if row.plan.id in losses else None


def _points(
    axis: Axis, cells: Sequence[Row], read: Callable[[Row], float | None]
) -> list[tuple[float, float]]:
    """Return the cells that have a figure as (number on the axis, figure), from left to right."""
    points = [(number_of(axis, row) or 0.0, read(row)) for row in cells]
    return sorted((x, y) for x, y in points if y is not None)


def _draw_line(
    panel: Axes, axis: Axis, cells: Sequence[Row], look: Look, read: Callable[[Row], float | None]
) -> None:
    """Draw the cells of one line. The markers of unchecked cells have a hole."""
    style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.dash}
    panel.plot(*zip(*_points(axis, cells, read)), markersize=5, linewidth=1.6, **style)
    unchecked = [row for row in cells if row.state == "unchecked"]
    for x, y in _points(axis, unchecked, read):
        panel.plot(x, y, marker=look.marker, color=colour("paper"), markersize=3)


def _draw_ideal(panel: Axes, axis: Axis, cells: Sequence[Row], most_processes: float) -> None:
    """Draw the throughput of one process times the number of processes, if one was measured."""
    points = _points(axis, cells, speed)
    if points and points[0][0] == 1:
        # The axis is logarithmic, on which this line is a curve.
        numbers = [most_processes ** (i / 32) for i in range(33)]
        ideal = [points[0][1] * number for number in numbers]
        panel.plot(numbers, ideal, color=colour("faint"), linewidth=0.9, dashes=(2, 2))
