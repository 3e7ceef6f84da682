"""The figures of a report, drawn from its rows. Each says in words what its marks say in colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.metrics.cell import Axis
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    bar_axis,
    bars,
    bars_height,
    beside,
    comma_ticks,
    grid,
    line_style,
    name_points,
    say_why,
    set_title,
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
from shardwise.report.words import byte_unit, group_title, number, printable, second_unit

if TYPE_CHECKING:
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
        drawn += [against(bench, axis, rows, look) for axis in numeric_axes(bench.sweep, rows)]
    if any(memory_parts(row) for row in rows):
        drawn.append(memory(strategies))
    if any(pareto(cells) for _, cells in strategies):
        drawn.append(plane(strategies, look))
    if any(_percentiles(row) for row in rows):
        drawn.append(steps(strategies, look))
    return drawn


Groups = Sequence[tuple[str, list[Row]]]


def losses(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Loss curves on one another; beside them, how far each is from its reference as a share of its tolerance."""
    shown = [(title, [row for row in cells if row.record and row.record.losses]) for title, cells in groups]
    shown = [(title, cells) for title, cells in shown if cells]
    figure, axes = grid(len(shown), 2, [2.6] * len(shown), extra=0.75)
    by_id = {row.plan.id: row for _, cells in shown for row in cells}
    handles: dict[str, Any] = {}
    for (title, cells), (left, right) in zip(shown, axes, strict=True):
        set_title(left, "Loss", title)
        set_title(right, "Departure from the reference, as a share of the tolerance", "")
        highest = 10.0
        for index, row in enumerate(cells):
            assert row.record is not None
            style = line_style(row, look[row.plan.id])
            x = range(1, len(row.record.losses) + 1)
            every = max(1, len(x) // 6)
            (handle,) = left.plot(x, row.record.losses, markevery=(index % every, every), **style)
            handles.setdefault(row.label + (" (wrong)" if row.state == "wrong" else ""), handle)
            reference = by_id.get(row.plan.reference or "")
            allowed = row.tolerance
            if reference is None or reference.record is None or not allowed:
                continue
            far = [abs(a - b) / allowed for a, b in zip(row.record.losses, reference.record.losses, strict=False)]
            far = [share if math.isfinite(share) else math.nan for share in far]
            highest = max([highest, *(3 * share for share in far if share == share)])
            right.plot(x, [max(share, FLOOR) for share in far], markevery=(index % every, every), **style)
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
        for panel in (left, right):
            whole_steps(panel)
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=min(5, len(handles)), labelcolor=colour("ink")
    )
    return Drawn(
        "losses",
        "The same losses",
        "Left: the loss of every step. Curves of cells that do the same work lie on one another. Right: how far each "
        "is from its reference; the noise control is the reference with its micro-batches in another order, "
        "and the tolerance is ten times what that alone does.",
        figure,
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


def against(bench: Bench, axis: Axis, rows: Sequence[Row], look: dict[str, Look]) -> Drawn:
    """Throughput and peak memory along an axis of numbers, a line for each combination of the other compared values."""
    others = [a for a in bench.sweep.axes if a.name != axis.name]
    panels: dict[tuple[str, ...], dict[tuple[str, ...], list[Row]]] = {}
    for row in rows:
        if row.plan.control:
            continue
        place = tuple(_value(a, row) for a in others if not a.compared and len(a.values) > 1)
        line = tuple(_value(a, row) for a in others if a.compared and len(a.values) > 1)
        panels.setdefault(place, {}).setdefault(line, []).append(row)
    figure, axes = grid(len(panels), 2, [2.7] * len(panels), extra=0.5)
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for row in rows), default=1))
    name = "processes" if set(axis.keys) <= {"nproc", "training.global_batch_size"} else axis.name.rpartition(".")[2]
    ticks = sorted({number_of(axis, row) or 0.0 for row in rows if not row.plan.control})
    handles: dict[str, Any] = {}
    for (place, lines), (left, right) in zip(panels.items(), axes, strict=True):
        set_title(left, "Throughput, tokens/s", printable(" · ".join(place)))
        set_title(right, f"Peak memory, {unit_name}", "")
        for line, cells in lines.items():
            style = look[cells[0].plan.id]
            for panel, read in ((left, _speed), (right, _peak_in(unit))):
                points = sorted(
                    (number_of(axis, row) or 0.0, value) for row in cells if (value := read(row)) is not None
                )
                (handle,) = panel.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=style.colour,
                    marker=style.marker,
                    linestyle=style.dash,
                    markersize=5,
                    linewidth=1.6,
                )
                handles.setdefault(printable(" · ".join(line)) or "all cells", handle)
                if panel is left and name == "processes" and points and points[0][0] == 1:
                    panel.plot(ticks, [points[0][1] * n for n in ticks], color=colour("faint"), lw=0.9, dashes=(2, 2))
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{value:,g}" for value in ticks])
            panel.set_xlabel(name)
            panel.set_ylim(bottom=0)
            comma_ticks(panel.yaxis)
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=min(5, len(handles)))
    ideal = f" Thin dashes: {scaling_kind(bench.sweep)} scaling as it would ideally be." if name == "processes" else ""
    return Drawn(
        f"against-{''.join(c if c.isalnum() else '-' for c in axis.name)}",
        f"Against {name}",
        f"Cells without a figure are left out of the lines; the table of all cells has the reason.{ideal}",
        figure,
    )


def memory(groups: Groups) -> Drawn:
    """What the peak is made of."""
    figure, axes = grid(len(groups), 1, [bars_height(cells) for _, cells in groups], extra=0.35)
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
    legend: dict[str, Any] = {}
    for (panel,) in axes:
        for handle, part in zip(*panel.get_legend_handles_labels(), strict=True):
            legend.setdefault(part, handle)
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=5, handlelength=1.6, handleheight=1.0)
    return Drawn(
        "memory-parts",
        "What the memory is",
        "At the peak, on the rank with the largest one. The parts add up to the peak: temporary is what no tensor of "
        "the other parts holds.",
        figure,
    )


def plane(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Every cell by its memory and its throughput, and the front of those that no other beats in both."""
    columns = min(2, len(groups))
    num_rows = math.ceil(len(groups) / columns)
    figure, axes = grid(num_rows, columns, [3.5] * num_rows)
    panels = [panel for line in axes for panel in line]
    unit, unit_name = byte_unit(max((row.peak_memory_bytes or 0 for _, cells in groups for row in cells), default=1))
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    for (title, cells), panel in zip(groups, panels, strict=False):
        panel.set_title(title)
        known = [row for row in cells if row.tokens_per_second and row.peak_memory_bytes]
        front = pareto(cells)
        points = {row.plan.id: ((row.peak_memory_bytes or 0) / unit, row.tokens_per_second or 0.0) for row in known}
        if front:
            xs, ys = zip(*(points[row.plan.id] for row in front), strict=True)
            panel.step(xs, ys, where="post", color=colour("accent"), linewidth=1.4, zorder=1)
        panel.margins(x=0.22, y=0.16)
        for row in known:
            x, y = points[row.plan.id]
            style, on_front = look[row.plan.id], row in front
            panel.plot(
                x,
                y,
                marker=style.marker,
                markersize=9 if on_front else 7,
                color=style.colour if on_front else "none",
                markeredgecolor=style.colour,
                markeredgewidth=1.3,
                linestyle="none",
            )
        panel.set_xlabel(f"peak memory, {unit_name}   (← less is better)")
        panel.set_ylabel("tokens/s   (more is better →)")
        comma_ticks(panel.xaxis)
        comma_ticks(panel.yaxis)
        name_points(panel, [(*points[row.plan.id], row.label, row in front) for row in known])
        if not known:
            panel.text(
                0.5, 0.5, "no cell has both figures", transform=panel.transAxes, ha="center", color=colour("muted")
            )
    return Drawn(
        "plane",
        "Throughput against memory",
        "Filled marks and bold names are on the Pareto front: no other cell of the group is at least as good in both "
        "and better in one. For every hollow mark there is a better choice.",
        figure,
    )


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
