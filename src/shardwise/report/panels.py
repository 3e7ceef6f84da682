"""What the figures are put together from: grids of panels, bars, and names beside points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.report.style import Look, colour
from shardwise.report.tables import Row
from shardwise.report.words import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Of every figure, in inches."""
BAR = 0.27
"""Height of a bar's place, in inches."""


def grid(
    num_rows: int, num_columns: int, heights: Sequence[float], extra: float = 0.0
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure and its panels, by rows; `heights` of the rows' insides and `extra`, for a legend, in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.04, hspace=0.04)
    # Titles and the ticks below take 0.65 inches of each row.
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.65 * num_rows + extra), layout=layout)
    axes = figure.subplots(num_rows, num_columns, squeeze=False, height_ratios=heights)
    return figure, [list(line) for line in axes]


def set_title(panel: Axes, what: str, group: str) -> None:
    """Say above a panel what it shows, and of which group."""
    panel.set_title(f"{group}\n{what}" if group else what)


def bars_height(cells: Sequence[Row]) -> float:
    """What a panel with a bar for each cell needs, in inches."""
    return max(2, len(cells)) * BAR


def bars(
    panel: Axes,
    cells: Sequence[Row],
    look: dict[str, Look],
    read: Callable[[Row], float | None],
    spread: Callable[[Row], tuple[float, float] | None],
) -> None:
    """A horizontal bar for each cell, the first on top, its value beside it."""
    largest = 0.0
    for place, row in enumerate(cells):
        value = read(row)
        if value is None:
            say_why(panel, place, row)
            continue
        panel.barh(place, value, height=0.62, color=look[row.plan.id].colour, linewidth=0)
        low_high = spread(row)
        if low_high:
            panel.plot(low_high, [place, place], color=colour("ink"), linewidth=1.2, marker="|", markersize=5)
        end = max(value, *(low_high or (0.0,)))
        largest = max(largest, end)
        beside(panel, place, end, number(value))
        if row.is_reference:
            panel.axvline(value, color=colour("faint"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
    bar_axis(panel, cells)
    panel.set_xlim(0, (largest or 1.0) * 1.16)


def bar_axis(panel: Axes, cells: Sequence[Row]) -> None:
    """Name the cells at the left, the first on top."""
    panel.set_yticks(range(len(cells)), [row.label for row in cells])
    panel.tick_params(axis="y", labelcolor=colour("ink"))
    panel.set_ylim(max(2, len(cells)) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.spines["left"].set_visible(False)
    comma_ticks(panel.xaxis)


def beside(panel: Axes, place: float, value: float, text: str) -> None:
    """Write a value behind the end of its bar."""
    panel.annotate(text, (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def say_why(panel: Axes, place: float, row: Row) -> None:
    """Write in the place of a bar why there is none."""
    wrong = row.state == "wrong"
    text = "✗ wrong" if wrong else "not measured" if row.measured else row.state
    panel.annotate(
        text,
        (0, place),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        style="normal" if wrong else "italic",
        weight="bold" if wrong else "normal",
        color=colour("bad" if wrong else "muted"),
    )


def line_style(row: Row, look: Look) -> dict[str, Any]:
    """How a loss curve is drawn: wrong cells, controls and references each in a way of their own."""
    if row.state == "wrong":
        return {"color": colour("bad"), "linestyle": (0, (4, 1.5)), "linewidth": 2.2, "marker": "x", "markersize": 6}
    if row.plan.control:
        return {"color": colour("muted"), "linestyle": (0, (1, 1.5)), "linewidth": 1.4, "marker": "1", "markersize": 7}
    if row.is_reference:
        return {"color": look.colour, "linestyle": "solid", "linewidth": 3.2, "alpha": 0.45, "marker": look.marker}
    return {"color": look.colour, "linestyle": look.dash, "linewidth": 1.3, "marker": look.marker, "markersize": 4.5}


def name_points(panel: Axes, points: Sequence[tuple[float, float, str, bool]]) -> None:
    """Names beside their points, moved up or down as far as needed to keep them apart."""
    panel.figure.canvas.draw_idle()
    to_pixels = panel.transData.transform
    line = 11.0 * panel.figure.dpi / 72
    taken: list[tuple[float, float, float]] = []
    panel.autoscale_view()
    for x, y, name, bold in sorted(points, key=lambda point: point[1]):
        left, height = to_pixels((x, y))
        right = left + (len(name) * 5.4 + 14) * panel.figure.dpi / 72
        place = height
        while any(abs(place - h) < line and left < r and right > start for start, r, h in taken):
            place += line / 4
        taken.append((left, right, place))
        panel.annotate(
            name,
            (x, y),
            xytext=(8, (place - height) * 72 / panel.figure.dpi),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            weight="bold" if bold else "normal",
            color=colour("ink" if bold else "muted"),
        )


def comma_ticks(axis: Any) -> None:
    """Few ticks, thousands apart."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def whole_steps(panel: Axes) -> None:
    """Ticks at whole steps alone."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panel.set_xlabel("step")
