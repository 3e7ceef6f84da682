"""The figures of a report, drawn from its rows. Each says in words what its marks say in colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.report.curves import against, losses
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    Drawn,
    Groups,
    bar_axis,
    bars,
    bars_height,
    beside,
    comma_ticks,
    grid,
    key,
    legend,
    name_points,
    say_why,
    set_title,
    settle,
)
from shardwise.report.style import HATCHES, Look, colour, looks
from shardwise.report.tables import (
    MEMORY_PARTS,
    Row,
    groups_of,
    memory_parts,
    numeric_axes,
    pareto,
)
from shardwise.report.words import byte_unit, group_title, number, second_unit, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_all(bench: Bench, rows: Sequence[Row]) -> list[Drawn]:
    """Every figure that these rows have anything for, in the order of the page; call it inside `drawing()`."""
    look = looks(bench.sweep, rows)
    groups = [(group_title(group, bench.sweep), cells) for group, cells in groups_of(rows).items()]
    strategies = [(title, [row for row in cells if not row.plan.control]) for title, cells in groups]
    drawn = []
    if any(row.record and row.record.losses for row in rows):
        drawn.append(losses(groups, look))
    if any(row.tokens_per_second or row.peak_memory_bytes for row in rows):
        drawn.append(throughput_and_memory(strategies, look))
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


def throughput_and_memory(groups: Groups, look: dict[str, Look]) -> Drawn:
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
