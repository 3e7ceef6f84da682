"""The figures of a report, drawn from its rows. Each says in words what its marks say in colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.metrics.cell import Axis
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    CONTROL,
    WRONG,
    bar_axis,
    bars,
    bars_height,
    beside,
    comma_ticks,
    grid,
    key,
    legend,
    line_style,
    name_points,
    say_why,
    set_title,
    settle,
    whole_steps,
)
from shardwise.report.style import HATCHES, Look, colour, looks
from shardwise.report.tables import (
    MEMORY_PARTS,
    Row,
    groups_of,
    memory_parts,
    number_of,
    numeric_axes,
    pareto,
    scaling_kind,
)
from shardwise.report.words import axis_name, byte_unit, group_title, named_values, number, second_unit, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-3
"""Share of the tolerance below which a departure is drawn as 0."""


@dataclass(frozen=True)
class Drawn:
    """A figure and what is said of it."""

    name: str  # of its files; an id in the page
    title: str
    caption: str
    figure: Figure


def draw_all(bench: Bench, rows: Sequence[Row]) -> list[Drawn]:
    """Every figure that these rows have anything for, in the order of the page; call it inside `drawing()`."""
    look = looks(bench.sweep, rows)
    groups = [(group_title(group, bench.sweep), cells) for group, cells in groups_of(rows).items()]
    strategies = [(title, [row for row in cells if not row.plan.control]) for title, cells in groups]
    drawn = []
    if any(row.record and row.record.losses for row in rows):
        drawn.append(losses(groups, look))
    if any(row.tokens_per_second or row.peak_memory_bytes for row in rows):
        drawn.append(strategies_figure(strategies, look))
        drawn += [against(bench, axis, rows) for axis in numeric_axes(bench.sweep, rows)]
    if any(memory_parts(row) for row in rows):
        drawn.append(memory(strategies))
    if any(pareto(cells) for _, cells in strategies):
        drawn.append(plane(strategies, look))
    if any(_percentiles(row) for row in rows):
        drawn.append(steps(strategies, look))
    for one in drawn:
        settle(one.figure)
    return drawn


Groups = Sequence[tuple[str, list[Row]]]


def losses(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Loss curves on one another; beside them, how far each is from its reference as a share of its tolerance."""
    shown = [(title, [row for row in cells if row.record and row.record.losses]) for title, cells in groups]
    shown = [(title, cells) for title, cells in shown if cells]
    figure, axes = grid(len(shown), 2, [2.6] * len(shown))
    by_id = {row.plan.id: row for _, cells in shown for row in cells}
    for (title, cells), (left, right) in zip(shown, axes, strict=True):
        set_title(left, "Loss", title)
        set_title(right, "Departure from the reference ÷ tolerance", "")
        highest = 10.0
        for index, row in enumerate(cells):
            assert row.record is not None
            style = line_style(row, look[row.plan.id])
            x = range(1, len(row.record.losses) + 1)
            every = max(1, len(x) // 6)
            left.plot(x, row.record.losses, markevery=(index % every, every), **style)
            reference = by_id.get(row.plan.reference or "")
            allowed = row.tolerance
            if reference is None or reference.record is None or not allowed:
                continue
            far = [abs(a - b) / allowed for a, b in zip(row.record.losses, reference.record.losses, strict=False)]
            far = [share if math.isfinite(share) else math.nan for share in far]
            highest = max([highest, *(3 * share for share in far if share == share)])
            right.plot(x, [max(share, FLOOR) for share in far], markevery=(index % every, every), **style)
            if row.state == "wrong":
                step = max(range(len(far)), key=far.__getitem__)
                _name_wrong(right, row.label, step + 1, far[step], len(x))
        right.set_yscale("log")
        right.set_ylim(FLOOR / 2, highest)
        right.axhline(1, color=colour("bad"), linewidth=1.1, dashes=(4, 2))
        right.annotate(
            "wrong above this line",
            (1, 1),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=colour("bad"),
            fontsize=8,
        )
        decades = [10.0**power for power in range(-2, math.floor(math.log10(highest)) + 1)]
        thinned = decades if len(decades) <= 6 else [1e-2, *decades[2 :: len(decades) // 5 + 1]]
        right.set_yticks([FLOOR, *thinned], ["0", *(f"{value:,g}" for value in thinned)])
        right.set_xlim(left.get_xlim())
        if not any(row.tolerance for row in cells):
            nothing = "no noise control: no tolerance is known, all cells are unchecked"
            right.text(0.5, 0.35, nothing, transform=right.transAxes, ha="center", color=colour("muted"))
        for panel in (left, right):
            whole_steps(panel)
    cells = [row for _, cells in shown for row in cells]
    special = {"noise control": CONTROL} if any(row.plan.control for row in cells) else {}
    special |= {"wrong": WRONG} if any(row.state == "wrong" for row in cells) else {}
    legend(figure, [look[row.plan.id] for row in cells if row.state != "wrong"], special)
    return Drawn(
        "losses",
        "The same losses",
        "Left: the loss of every step. Curves of cells that do the same work lie on one another; the broad pale one is "
        "the reference. Right: how far each "
        "is from its reference; the noise control is the reference with its micro-batches in another order, "
        "and the tolerance is ten times what that alone does.",
        figure,
    )


def _name_wrong(panel: Axes, name: str, step: int, share: float, num_steps: int) -> None:
    early = step <= 0.6 * num_steps
    panel.annotate(
        f"✗ {name}",
        (step, share),
        xytext=(7 if early else -7, 0),
        textcoords="offset points",
        ha="left" if early else "right",
        va="center",
        color=colour("bad"),
        fontsize=8.5,
        weight="bold",
    )


def strategies_figure(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Throughput and peak memory, a bar for each cell; where a figure is not to be had, the reason's name."""
    figure, axes = grid(len(groups), 2, [bars_height(cells) for _, cells in groups])
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for _, cells in groups for row in cells), default=1))
    for (title, cells), (left, right) in zip(groups, axes, strict=True):
        set_title(left, "Throughput, tokens/s", title)
        set_title(right, f"Peak memory, {unit_name}", "")
        bars(left, cells, look, lambda row: row.tokens_per_second, lambda row: row.tokens_range)
        bars(
            right,
            cells,
            look,
            lambda row: row.peak_memory_bytes / unit if row.peak_memory_bytes else None,
            lambda _: None,
        )
        right.tick_params(labelleft=False)
    return Drawn(
        "throughput-memory",
        "Throughput and peak memory",
        "Medians over the rounds; whiskers go from the slowest to the fastest round. Memory is that of the rank with "
        "the most. A dashed line marks the reference.",
        figure,
    )


def against(bench: Bench, axis: Axis, rows: Sequence[Row]) -> Drawn:
    """Throughput and peak memory along an axis of numbers, a line for each combination of the other compared values."""
    cells = [row for row in rows if not row.plan.control]
    look = looks(bench.sweep, cells, apart_from=axis.name)
    work = [other for other in bench.sweep.axes if other.name != axis.name and not other.compared]
    lines: dict[str, dict[Look, list[Row]]] = {}
    for row in cells:
        lines.setdefault(named_values(row.plan, work), {}).setdefault(look[row.plan.id], []).append(row)
    figure, axes = grid(len(lines), 2, [2.7] * len(lines))
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for row in rows), default=1))
    name = "processes" if "nproc" in axis.keys else axis_name(axis)
    ticks = sorted({number_of(axis, row) or 0.0 for row in cells})
    for (title, of_title), (left, right) in zip(lines.items(), axes, strict=True):
        set_title(left, "Throughput, tokens/s", title)
        set_title(right, f"Peak memory, {unit_name}", "")
        for style, of_line in of_title.items():
            for panel, read in ((left, _speed), (right, _peak_in(unit))):
                found = sorted(
                    (number_of(axis, row) or 0.0, value) for row in of_line if (value := read(row)) is not None
                )
                panel.plot(
                    [x for x, _ in found],
                    [y for _, y in found],
                    color=style.colour,
                    marker=style.marker,
                    linestyle=style.dash,
                    markersize=5,
                    linewidth=1.6,
                )
                open_marks = [
                    (number_of(axis, row) or 0.0, y) for row in of_line if row.state == "unchecked" and (y := read(row))
                ]
                for x, y in open_marks:
                    panel.plot(x, y, marker=style.marker, color=colour("paper"), markersize=3, linestyle="none")
                if panel is left and name == "processes" and found and found[0][0] == 1:
                    even = [ticks[-1] ** (i / 32) for i in range(33)]
                    panel.plot(even, [found[0][1] * n for n in even], color=colour("faint"), lw=0.9, dashes=(2, 2))
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{value:,g}" for value in ticks])
            panel.set_xlabel(name)
            panel.set_ylim(bottom=0)
            comma_ticks(panel.yaxis)
    legend(figure, list(look.values()), {})
    ideal = f" Thin dashes: {scaling_kind(bench.sweep)} scaling as it would ideally be." if name == "processes" else ""
    unchecked = " Marks with a hole are unchecked." if any(row.state == "unchecked" for row in cells) else ""
    return Drawn(
        f"against-{''.join(c if c.isalnum() else '-' for c in axis.name)}",
        f"Against {name}",
        f"Cells without a figure are left out of the lines; the table of all cells has the reason.{ideal}{unchecked}",
        figure,
    )


def memory(groups: Groups) -> Drawn:
    """What the peak is made of."""
    figure, axes = grid(len(groups), 1, [bars_height(cells) for _, cells in groups])
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for _, cells in groups for row in cells), default=1))
    fills = ("c1", "c2", "c3", "c4", "c7")
    for (title, cells), (panel,) in zip(groups, axes, strict=True):
        set_title(panel, f"Peak memory, {unit_name}", title)
        for place, row in enumerate(cells):
            parts = memory_parts(row)
            if parts is None:
                say_why(panel, place, row)
                continue
            start = 0.0
            for part, fill, hatch in zip(MEMORY_PARTS, fills, HATCHES, strict=False):
                width = parts[part] / unit
                panel.barh(
                    place, width, left=start, height=0.66, color=colour(fill), hatch=hatch, label=part, linewidth=0
                )
                start += width
            beside(panel, place, start, number(start))
        bar_axis(panel, cells)
        panel.set_xlim(0, (max(((row.peak_memory_bytes or 0) for row in cells), default=0) / unit or 1) * 1.1)
    parts = {}
    for (panel,) in axes:
        for handle, part in zip(*panel.get_legend_handles_labels(), strict=True):
            parts.setdefault(part, handle)
    key(figure, list(parts.values()), list(parts))
    return Drawn(
        "memory-parts",
        "What the memory is",
        "At the peak, on the rank with the largest one. The parts add up to the peak: temporary is what no tensor of "
        "the other parts holds.",
        figure,
    )


def plane(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Every cell by its memory and its throughput, and the front of those that no other beats in both."""
    figure, axes = grid(len(groups), 2, [3.0] * len(groups), [1.7, 1.0])
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for _, cells in groups for row in cells), default=1))
    named: list[tuple[Axes, list[tuple[float, float, str, bool]]]] = []
    for (title, cells), (panel, names) in zip(groups, axes, strict=True):
        panel.set_title(title)
        points = {
            row.plan.id: (row.peak_memory_bytes / unit, row.tokens_per_second)
            for row in cells
            if row.tokens_per_second and row.peak_memory_bytes
        }
        front = pareto(cells)
        panel.step(
            [points[row.plan.id][0] for row in front],
            [points[row.plan.id][1] for row in front],
            where="post",
            color=colour("accent"),
            linewidth=1.4,
            zorder=1,
        )
        few = len(points) <= 8
        beside_points = []
        for row in cells:
            if row.plan.id not in points:
                continue
            x, y = points[row.plan.id]
            style, place = look[row.plan.id], front.index(row) + 1 if row in front else 0
            panel.plot(
                x,
                y,
                marker=style.marker,
                markersize=9 if place else 6.5,
                color=style.colour if place else "none",
                markeredgecolor=style.colour,
                markeredgewidth=1.3,
                linestyle="none",
            )
            if few or place:
                words = [str(place)] * bool(place) + [row.name] * few
                beside_points.append((x, y, " ".join(words), bool(place)))
        named.append((panel, beside_points))
        panel.margins(x=0.14, y=0.16)
        panel.set_xlabel(f"peak memory, {unit_name}   (← less is better)")
        panel.set_ylabel("tokens/s   (more is better →)")
        comma_ticks(panel.xaxis)
        comma_ticks(panel.yaxis)
        _list_front(names, front)
    used = [look[row.plan.id] for _, cells in groups for row in cells if row.measured]
    if any(len(cells) > 8 for _, cells in groups):
        legend(figure, [replace(one, variant="") for one in used], {})
    settle(figure)
    for panel, beside_points in named:
        name_points(panel, beside_points)
    return Drawn(
        "plane",
        "Throughput against memory",
        "Filled marks are on the Pareto front: no other cell of the group is at least as good in both "
        "and better in one. For every hollow mark there is a better choice.",
        figure,
    )


def _list_front(panel: Axes, front: Sequence[Row]) -> None:
    """The members of the front by name, with their numbers in the plot."""
    panel.set_axis_off()
    panel.set_title("On the Pareto front, leanest first" if front else "No cell has both figures")
    roomy = len(front) <= 9
    line = 0.106 if roomy else 1 / len(front)
    for place, row in enumerate(front):
        figures = f"{size(row.peak_memory_bytes)}, {number(row.tokens_per_second)} tokens/s"
        top = 0.98 - place * line
        panel.text(0, top, f"{place + 1}", transform=panel.transAxes, va="top", fontsize=8.5, weight="bold")
        panel.text(0.09, top, row.name, transform=panel.transAxes, va="top", fontsize=8.5)
        if roomy:
            below = top - 0.048
            panel.text(0.09, below, figures, transform=panel.transAxes, va="top", fontsize=7.5, color=colour("muted"))


def steps(groups: Groups, look: dict[str, Look]) -> Drawn:
    """How even the steps are: p10 to p90 as a bar, the median as a mark, the longest step as a tick."""
    figure, axes = grid(len(groups), 1, [bars_height(cells) for _, cells in groups])
    longest = max((found["max"] for _, cells in groups for row in cells if (found := _percentiles(row))), default=1.0)
    unit, unit_name = second_unit(longest)
    for (title, cells), (panel,) in zip(groups, axes, strict=True):
        set_title(panel, f"Step time, {unit_name}", title)
        for place, row in enumerate(cells):
            found = _percentiles(row)
            if found is None:
                say_why(panel, place, row)
                continue
            p10, p50, p90, most = (found[key] / unit for key in ("p10", "p50", "p90", "max"))
            style = look[row.plan.id]
            panel.plot([p10, most], [place, place], color=colour("faint"), linewidth=1)
            panel.plot([p10, p90], [place, place], color=style.colour, linewidth=6, alpha=0.45, solid_capstyle="butt")
            panel.plot(p50, place, marker=style.marker, color=style.colour, markersize=7)
            panel.plot(most, place, marker="|", color=colour("ink"), markersize=9, markeredgewidth=1.4)
            beside(panel, place, most, number(p50))
        bar_axis(panel, cells)
        panel.set_xlim(0, max((f["max"] for row in cells if (f := _percentiles(row))), default=unit) / unit * 1.1)
    return Drawn(
        "steps",
        "Step times",
        "Mark: the median (p50), written beside the row. Thick bar: p10 to p90. Tick: the longest step.",
        figure,
    )


def _percentiles(row: Row) -> dict[str, float] | None:
    found = row.record.step_seconds if row.record and row.measured else None
    return found if found and {"p10", "p50", "p90", "max"} <= found.keys() else None


def _speed(row: Row) -> float | None:
    return row.tokens_per_second


def _peak_in(unit: float) -> Callable[[Row], float | None]:
    return lambda row: row.peak_memory_bytes / unit if row.peak_memory_bytes else None


def _value(axis: Axis, row: Row) -> str:
    value = row.plan.values.get(axis.name, "")
    return f"{axis.name.rpartition('.')[2]} {value}" if value.replace(".", "").isdigit() else value
