"""The parts of which figures are made: grids of panels, places and bars of cells, and legends.

A panel is one matplotlib Axes. Lengths of figures are in inches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.base.words import byte_unit, number, one_line
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.style import Look
from shardwise.lab.report.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""The width of every figure, in inches."""
BAR_HEIGHT = 0.27
"""The height of the place of a bar, in inches."""
MOST_ON_A_SHEET = 1.5
"""The height of a figure over its width, up to which it is printed on one sheet of paper."""
MAX_NAME = 44
"""The most characters of a name in a figure."""
LEGEND_WIDTH = 125
"""The characters that fit into a line of a legend above the panels."""
Groups = Sequence[tuple[str, list[Row]]]
"""The title of each group of cells, and its rows."""
BESIDE: Mapping[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
"""The place of text beside the end of a bar."""


@dataclass(frozen=True)
class Drawn:
    """A figure with its title and caption."""

    name: str  # name of its files, and its id on the page
    title: str
    caption: str
    figure: Figure

    @property
    def is_tall(self) -> bool:
        """Return whether it would be small on one sheet of paper."""
        return self.figure.get_figheight() > MOST_ON_A_SHEET * self.figure.get_figwidth()


def grid(
    num_rows: int, num_columns: int, heights: Sequence[float], widths: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """Return an empty figure and its panels, row by row.

    `heights` are those of the rows' panels in inches, `widths` those of the columns relative to
    each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.04, hspace=0.04)
    # Titles and ticks take 0.65 inches of each row.
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.65 * num_rows), layout=layout)
    axes = figure.subplots(
        num_rows, num_columns, squeeze=False, height_ratios=heights, width_ratios=widths
    )
    return figure, [list(row) for row in axes]


def set_title(panel: Axes, quantity: str, group: str) -> None:
    """Write above a panel which quantity it shows, and of which group of cells."""
    panel.set_title(f"{group}\n{quantity}" if group else quantity)


def bars_height(cells: Sequence[Row]) -> float:
    """Return the height of a panel with a bar for each cell, in inches."""
    per_bar = BAR_HEIGHT if len(cells) <= 12 else 0.75 * BAR_HEIGHT
    return max(2, len(cells)) * per_bar


def legend(
    figure: Figure,
    cells: Sequence[Row],
    look: Mapping[str, Look],
    special: Mapping[str, Mapping[str, Any]],
    dashes: bool = True,
) -> None:
    """Draw a legend above the panels.

    It lists the colours and markers of the cells, then their dashes, then the `special` line styles
    by name. A name whose cells are all unchecked is marked as such.
    """
    from matplotlib.lines import Line2D

    states: dict[str, set[str]] = {}
    for row in cells:
        states.setdefault(look[row.plan.id].name, set()).add(row.state)
    entries = {}
    styles = [look[row.plan.id] for row in cells]
    for style in styles:
        if style.name:
            mark = " (unchecked)" if states[style.name] == {"unchecked"} else ""
            entries[f"{one_line(style.name, MAX_NAME)}{mark}"] = Line2D(
                [], [], color=style.colour, marker=style.marker, markersize=5, linewidth=1.6
            )
    variants = {style.variant: style.dash for style in styles if style.variant}
    if dashes and len(variants) > 1:
        for name, dash in variants.items():
            line = Line2D([], [], color=colour("muted"), linestyle=dash, linewidth=1.6)
            entries[one_line(name, MAX_NAME)] = line
    for name, style in special.items():
        entries[name] = Line2D([], [], **style)
    if len(entries) > 1:
        draw_legend(figure, list(entries.values()), list(entries))


def draw_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Draw a legend above the panels in as many columns as fit. The figure grows by its height."""
    widths = [len(name) + 7 for name in names]  # in characters; the handle takes seven
    num_columns = len(names)
    if sum(widths) > LEGEND_WIDTH:
        num_columns = min(num_columns, max(1, LEGEND_WIDTH // max(widths)))
    num_lines = -(-len(names) // num_columns)
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.19 * num_lines)
    spacing: dict[str, Any] = {"handlelength": 2.6, "handleheight": 1.0, "columnspacing": 1.6}
    figure.legend(handles, names, loc="outside upper left", ncols=num_columns, **spacing)


def speed(row: Row) -> float | None:
    """Return the tokens per second of a cell."""
    return row.tokens_per_second


def peak_in(unit: float) -> Callable[[Row], float | None]:
    """Return a function that gives the peak memory of a cell in units of so many bytes."""
    return lambda row: row.peak_memory_bytes / unit if row.peak_memory_bytes else None


def peak_unit(cells: Iterable[Row]) -> tuple[float, str]:
    """Return the unit for the peak memory of these cells: its size in bytes, and its name."""
    return byte_unit(max((row.peak_memory_bytes or 0 for row in cells), default=1))


def bars(
    panel: Axes,
    cells: Sequence[Row],
    look: dict[str, Look],
    read: Callable[[Row], float | None],
    read_range: Callable[[Row], tuple[float, float] | None] = lambda _: None,
) -> None:
    """Draw a horizontal bar for each cell, its value beside it, and a whisker over its range."""

    def draw(place: int, row: Row) -> tuple[float, str] | None:
        value, low_high = read(row), read_range(row)
        if value is None:
            return None
        panel.barh(place, value, height=0.62, color=look[row.plan.id].colour, linewidth=0)
        if low_high:
            whisker: Any = {"color": colour("ink"), "linewidth": 1.2}
            panel.plot(low_high, [place, place], marker="|", markersize=5, **whisker)
        if row.is_baseline:
            panel.axvline(value, color=colour("faint"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
        return max(value, *(low_high or (0.0,))), number(value)

    in_places(panel, cells, draw)


def in_places(
    panel: Axes,
    cells: Sequence[Row],
    draw: Callable[[int, Row], tuple[float, str] | None],
    reason: Callable[[Row], str] = lambda row: "not measured" if row.measured else row.state,
) -> float:
    """Draw the cells one below the other, the first on top, with its name on the left.

    `draw` draws one cell and returns where the drawing ends, and the text to write there. It
    returns None where the cell has no figure; then `reason` gives the text in its place. Return the
    end of the longest drawing.
    """
    longest = 0.0
    # A light box keeps lines from running through a text.
    box = {"facecolor": colour("paper"), "edgecolor": "none", "pad": 1.0}
    for place, row in enumerate(cells):
        drawn = draw(place, row)
        if drawn is None:
            text = reason(row)
            style: dict[str, Any] = {"style": "italic", "color": colour("muted")}
            if row.state == "wrong":
                text = "✗ wrong"
                style = {"weight": "bold", "color": colour("bad")}
            panel.annotate(text, (0, place), fontsize=8.5, **style, **BESIDE)
        else:
            end, text = drawn
            longest = max(longest, end)
            panel.annotate(text, (end, place), fontsize=8.5, bbox=box, **BESIDE)
    panel.set_xlim(0, (longest or 1.0) * 1.16)
    panel.set_yticks(range(len(cells)), [one_line(row.name, MAX_NAME) for row in cells])
    panel.tick_params(axis="y", labelcolor=colour("ink"))
    panel.set_ylim(max(2, len(cells)) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.spines["left"].set_visible(False)
    comma_ticks(panel.xaxis)
    return longest


def panel_per_group(
    groups: Groups, quantity: str, draw: Callable[[Axes, int, Row], tuple[float, str] | None]
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each group, in which `draw` draws the cells in places."""
    figure, panels = grid(len(groups), 1, [bars_height(cells) for _, cells in groups])
    for (title, cells), (panel,) in zip(groups, panels, strict=True):
        set_title(panel, quantity, title)
        in_places(panel, cells, partial(draw, panel))
    return figure, [panel for (panel,) in panels]


def comma_ticks(axis: Any) -> None:
    """Set at most six ticks on an axis, with commas between thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
