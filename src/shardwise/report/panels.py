"""What the figures are put together from: grids of panels, bars, and names beside points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.drawing.svg import colour
from shardwise.report.style import Look
from shardwise.report.tables import Row
from shardwise.report.words import byte_unit, number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Of every figure, in inches."""
BAR = 0.27
"""Height of a bar's place, in inches."""
NAME = 44
"""The most characters of a name in a figure."""
Groups = Sequence[tuple[str, list[Row]]]
"""The title of each group of cells, and its rows."""
BESIDE: Mapping[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
"""Where text begins behind the end of a bar."""


@dataclass(frozen=True)
class Drawn:
    """A figure and what is said of it."""

    name: str  # of its files; an id in the page
    title: str
    caption: str
    figure: Figure


def grid(
    num_rows: int, num_columns: int, heights: Sequence[float], widths: Sequence[float] | None = None
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure and its panels, by rows; `heights` of the rows' insides in inches, `widths` as shares."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.04, hspace=0.04)
    # Titles and the ticks below take 0.65 inches of each row.
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.65 * num_rows), layout=layout)
    axes = figure.subplots(num_rows, num_columns, squeeze=False, height_ratios=heights, width_ratios=widths)
    return figure, [list(line) for line in axes]


def set_title(panel: Axes, what: str, group: str) -> None:
    """Say above a panel what it shows, and of which group."""
    panel.set_title(f"{group}\n{what}" if group else what)


def bars_height(cells: Sequence[Row]) -> float:
    """What a panel with a bar for each cell needs, in inches."""
    return max(2, len(cells)) * (BAR if len(cells) <= 12 else 0.75 * BAR)


def legend(
    figure: Figure,
    cells: Sequence[Row],
    look: Mapping[str, Look],
    special: Mapping[str, Mapping[str, Any]],
    dashes: bool = True,
) -> None:
    """Above the panels: what these cells' colours and markers stand for, then dashes, then lines of a way of their own.

    A name all of whose cells are unchecked says so.
    """
    from matplotlib.lines import Line2D

    states: dict[str, set[str]] = {}
    for row in cells:
        states.setdefault(look[row.plan.id].name, set()).add(row.state)
    entries = {}
    for row in cells:
        style = look[row.plan.id]
        mark = " (unchecked)" if states[style.name] == {"unchecked"} else ""
        if style.name:
            entries[f"{printable(style.name, NAME)}{mark}"] = Line2D(
                [], [], color=style.colour, marker=style.marker, markersize=5, linewidth=1.6
            )
    variants = {look[row.plan.id].variant: look[row.plan.id].dash for row in cells if look[row.plan.id].variant}
    if dashes and len(variants) > 1:
        entries |= {
            printable(name, NAME): Line2D([], [], color=colour("muted"), linestyle=dash, linewidth=1.6)
            for name, dash in variants.items()
        }
    entries |= {name: Line2D([], [], **style) for name, style in special.items()}
    if len(entries) > 1:
        key(figure, list(entries.values()), list(entries))


def key(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """A legend above the panels in as many columns as fit, for which the figure grows."""
    room = 125  # characters, of which each entry takes seven for its mark
    in_one = sum(len(name) + 7 for name in names) <= room
    num_columns = len(names) if in_one else min(len(names), max(1, room // (max(map(len, names)) + 7)))
    num_lines = -(-len(names) // num_columns)
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.19 * num_lines)
    look: dict[str, Any] = {"handlelength": 2.6, "handleheight": 1.0, "columnspacing": 1.6}
    figure.legend(handles, names, loc="outside upper left", ncols=num_columns, **look)


def settle(figure: Figure) -> None:
    """Lay the panels out once and for all; what is added later is placed by where they are."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def speed(row: Row) -> float | None:
    """Tokens per second."""
    return row.tokens_per_second


def peak_in(unit: float) -> Callable[[Row], float | None]:
    """The peak memory of a cell, in units of so many bytes."""
    return lambda row: row.peak_memory_bytes / unit if row.peak_memory_bytes else None


def peak_unit(cells: Iterable[Row]) -> tuple[float, str]:
    """The unit in which these cells' peak memory is told, and its name."""
    return byte_unit(max((row.peak_memory_bytes or 0 for row in cells), default=1))


def bars(
    panel: Axes,
    cells: Sequence[Row],
    look: dict[str, Look],
    read: Callable[[Row], float | None],
    spread: Callable[[Row], tuple[float, float] | None] = lambda _: None,
) -> None:
    """A horizontal bar for each cell, its value beside it."""

    def draw(place: int, row: Row) -> tuple[float, float] | None:
        value, low_high = read(row), spread(row)
        if value is None:
            return None
        panel.barh(place, value, height=0.62, color=look[row.plan.id].colour, linewidth=0)
        if low_high:
            panel.plot(low_high, [place, place], color=colour("ink"), linewidth=1.2, marker="|", markersize=5)
        if row.is_baseline:
            panel.axvline(value, color=colour("faint"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
        return max(value, *(low_high or (0.0,))), value

    in_places(panel, cells, draw)


def in_places(panel: Axes, cells: Sequence[Row], draw: Callable[[int, Row], tuple[float, float] | None]) -> None:
    """A place for each cell, the first on top, with its name at the left.

    `draw` tells where what it has drawn ends, and the number to write there; None where there is nothing to draw.
    """
    largest = 0.0
    for place, row in enumerate(cells):
        drawn = draw(place, row)
        if drawn is None:
            _say_why(panel, place, row)
            continue
        end, value = drawn
        largest = max(largest, end)
        clear = {"facecolor": colour("paper"), "edgecolor": "none", "pad": 1.0}  # of lines that would run through it
        panel.annotate(number(value), (end, place), fontsize=8.5, bbox=clear, **BESIDE)
    panel.set_xlim(0, (largest or 1.0) * 1.16)
    name_places(panel, [row.name for row in cells])
    comma_ticks(panel.xaxis)


def name_places(panel: Axes, names: Sequence[str]) -> None:
    """A name at the left of each place of a panel, the first on top."""
    panel.set_yticks(range(len(names)), [printable(name, NAME) for name in names])
    panel.tick_params(axis="y", labelcolor=colour("ink"))
    panel.set_ylim(max(2, len(names)) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.spines["left"].set_visible(False)


def _say_why(panel: Axes, place: float, row: Row) -> None:
    """Write in the place of a bar why there is none."""
    wrong = row.state == "wrong"
    text = "✗ wrong" if wrong else "not measured" if row.measured else row.state
    how: dict[str, Any] = (
        {"weight": "bold", "color": colour("bad")} if wrong else {"style": "italic", "color": colour("muted")}
    )
    panel.annotate(text, (0, place), xycoords=("axes fraction", "data"), fontsize=8.5, **how, **BESIDE)


WRONG: Mapping[str, Any] = {
    "color": colour("bad"), "linestyle": (0, (4, 1.5)), "linewidth": 2.2, "marker": "x", "markersize": 6,
}  # fmt: skip
CONTROL: Mapping[str, Any] = {
    "color": colour("muted"), "linestyle": (0, (1, 1.5)), "linewidth": 1.4, "marker": "1", "markersize": 7,
}  # fmt: skip


def line_style(row: Row, look: Look) -> Mapping[str, Any]:
    """How a loss curve is drawn: wrong cells, controls and references each in a way of their own."""
    if row.state == "wrong":
        return WRONG
    if row.plan.control:
        return CONTROL
    if row.is_reference:
        return {"color": look.colour, "linestyle": "solid", "linewidth": 4.0, "alpha": 0.4, "marker": look.marker}
    return {"color": look.colour, "linestyle": look.dash, "linewidth": 1.3, "marker": look.marker, "markersize": 4.5}


def number_points(
    panel: Axes, points: Sequence[tuple[float, float, str, bool]], others: Sequence[tuple[float, float]]
) -> None:
    """Numbers in circles on their points, filled where so asked; one with no room there, clear of `others`, is moved.

    For a figure that is settled.
    """
    dots = panel.figure.dpi / 72
    step = 17 * dots
    leash = {"arrowstyle": "-", "color": colour("muted"), "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    taken = [tuple(panel.transData.transform(point)) for point in others]
    turns = [sign * i * math.pi / 6 for i in range(7) for sign in (1, -1)]
    for x, y, text, filled in points:
        at = panel.transData.transform((x, y))
        away = math.pi * (0.75 if filled else -0.25)  # the front rises: left of it and above there is nothing
        ways = [(r * math.cos(away + turn), r * math.sin(away + turn)) for r in (1, 1.5, 2, 3) for turn in turns]
        places = [(at[0] + dx * step, at[1] + dy * step) for dx, dy in [(0.0, 0.0), *ways]]
        free = (place for place in places if all(math.dist(place, other) >= 0.99 * step for other in taken))
        place = next(free, places[0])
        taken.append(place)
        moved = ((place[0] - at[0]) / dots, (place[1] - at[1]) / dots)
        if place != places[0]:  # below every number
            panel.annotate("", (x, y), xytext=moved, textcoords="offset points", arrowprops=leash, zorder=3)
        panel.annotate(
            text,
            (x, y),
            xytext=moved,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7.5,
            weight="bold" if filled else "normal",
            color=colour("paper" if filled else "ink"),
            bbox={
                "boxstyle": f"circle,pad={0.35 if len(text) == 1 else 0.2}",
                "facecolor": colour("accent" if filled else "paper"),
                "edgecolor": colour("accent" if filled else "faint"),
            },
            zorder=5 if filled else 4,
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
