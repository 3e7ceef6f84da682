"""The figures of a report, drawn from its rows. Each says in words what its marks say in colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.drawing.svg import colour
from shardwise.report.curves import against, losses
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    NAME,
    Drawn,
    Groups,
    bars,
    bars_height,
    comma_ticks,
    grid,
    in_places,
    key,
    legend,
    number_points,
    peak_in,
    peak_unit,
    set_title,
    settle,
    speed,
)
from shardwise.report.style import HATCHES, Look, looks
from shardwise.report.tables import (
    MEMORY_PARTS,
    Row,
    candidates,
    groups_of,
    memory_parts,
    numeric_axes,
    pareto,
)
from shardwise.report.words import group_title, number, printable, second_unit, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = ("losses", "throughput-memory", "memory-parts", "plane", "steps")
"""Of the figures, beside those along axes of numbers."""
MOST_NUMBERED = 12
"""With more cells in a plane, only those on the front have numbers there."""


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
        drawn += _unique([against(bench, axis, rows) for axis in numeric_axes(bench.sweep, rows)])
    if any(memory_parts(row) for row in rows):
        drawn.append(memory(strategies))
    if any(_both(cells) for _, cells in strategies):
        drawn.append(plane(strategies, look))
    if any(_percentiles(row) for row in rows):
        drawn.append(steps(strategies, look))
    for one in drawn:
        settle(one.figure)
    return drawn


def throughput_and_memory(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Throughput and peak memory, a bar for each cell; where a figure is not to be had, the reason's name."""
    figure, axes = grid(len(groups), 2, [bars_height(cells) for _, cells in groups])
    unit, unit_name = peak_unit(row for _, cells in groups for row in cells)
    for (title, cells), (left, right) in zip(groups, axes, strict=True):
        set_title(left, "Throughput, tokens/s", title)
        set_title(right, f"Peak memory, {unit_name}", "")
        bars(left, cells, look, speed, lambda row: row.tokens_range)
        bars(right, cells, look, peak_in(unit))
        right.tick_params(labelleft=False)
    return Drawn(
        "throughput-memory",
        "Throughput and peak memory",
        "Medians over the rounds; whiskers go from the slowest to the fastest round. Memory is that of the rank with "
        "the most. A dashed line marks the baseline.",
        figure,
    )


def memory(groups: Groups) -> Drawn:
    """What the peak is made of."""
    figure, axes = grid(len(groups), 1, [bars_height(cells) for _, cells in groups])
    unit, unit_name = peak_unit(row for _, cells in groups for row in cells)
    for (title, cells), (panel,) in zip(groups, axes, strict=True):
        set_title(panel, f"Peak memory, {unit_name}", title)
        in_places(panel, cells, partial(_stack, panel, unit))
    parts = {part: one for (panel,) in axes for one, part in zip(*panel.get_legend_handles_labels(), strict=True)}
    key(figure, list(parts.values()), list(parts))
    return Drawn(
        "memory-parts",
        "What the memory is",
        "At the peak of the first good round, on the rank with the largest one; the number is the sum of the parts, "
        "from which the median over the rounds may differ. Temporary is what no tensor of the other parts holds.",
        figure,
    )


def _stack(panel: Axes, unit: float, place: int, row: Row) -> tuple[float, float] | None:
    parts = memory_parts(row)
    if parts is None:
        return None
    end = 0.0
    for part, fill, hatch in zip(MEMORY_PARTS, ("c1", "c2", "c3", "c4", "c7"), HATCHES, strict=False):
        width = parts[part] / unit
        panel.barh(place, width, left=end, height=0.66, color=colour(fill), hatch=hatch, label=part, linewidth=0)
        end += width
    return end, end


def plane(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Every cell by its memory and its throughput, and the front of those that no other beats in both."""
    listed = [_listed(cells) for _, cells in groups]
    figure, axes = grid(len(groups), 2, [max(2.8, 0.2 * len(rows)) for rows in listed], [1.6, 1.0])
    unit, unit_name = peak_unit(row for _, cells in groups for row in cells)
    numbered: list[tuple[Axes, list[tuple[float, float, str, bool]], list[tuple[float, float]]]] = []
    others: list[Row] = []
    for (title, cells), rows, (panel, names) in zip(groups, listed, axes, strict=True):
        panel.set_title(title)
        points = {
            row.plan.id: ((row.peak_memory_bytes or 0) / unit, row.tokens_per_second or 0.0) for row in _both(cells)
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
        for row in _both(cells):
            style, is_listed = look[row.plan.id], row in rows
            mark: dict[str, Any] = {"marker": "." if is_listed else style.marker, "markersize": 3 if is_listed else 6}
            mark["markeredgecolor"] = colour("faint") if is_listed else style.colour
            panel.plot(*points[row.plan.id], linestyle="none", markeredgewidth=1.2, color="none", **mark)
            others += [] if is_listed else [row]
        with_numbers = [(*points.pop(row.plan.id), str(i), row in front) for i, row in enumerate(rows, 1)]
        numbered.append((panel, with_numbers, [*points.values()]))
        # From zero, so that a distance on the page is what it says: a cut axis makes 1 % look like half.
        panel.set_xlim(0, 1.14 * max([x for x, *_ in with_numbers] + [x for x, _ in points.values()], default=1.0))
        panel.set_ylim(0, 1.16 * max([y for _, y, *_ in with_numbers] + [y for _, y in points.values()], default=1.0))
        panel.set_xlabel(f"peak memory, {unit_name}   (← less is better)")
        panel.set_ylabel("tokens/s   (more is better →)")
        comma_ticks(panel.xaxis)
        comma_ticks(panel.yaxis)
        _list(names, rows, len(front))
    legend(figure, others, look, {}, dashes=False)
    settle(figure)
    for panel, with_numbers, without in numbered:
        number_points(panel, with_numbers, without)
    # What is not a candidate for the front may beat all that are.
    apart = any(row not in candidates(cells) for _, cells in groups for row in _both(cells))
    hollow = "For every hollow mark there is a better choice."
    if apart:
        hollow = (
            "For every hollow mark of a checked cell there is a better choice. Unchecked cells, hollow too, are not "
            "compared with the front, as nothing shows that they computed the right thing."
        )
    return Drawn(
        "plane",
        "Throughput against memory",
        "Filled marks are on the Pareto front: no other cell of the group is at least as good in both and better in "
        f"one. {hollow}",
        figure,
    )


def _both(cells: Sequence[Row]) -> list[Row]:
    return [row for row in cells if row.tokens_per_second and row.peak_memory_bytes]


def _listed(cells: Sequence[Row]) -> list[Row]:
    """The cells that have a number in the plane: the front, and all others where they are few."""
    front, known = pareto(cells), _both(cells)
    return front + [row for row in known if row not in front] * (len(known) <= MOST_NUMBERED)


def _list(panel: Axes, rows: Sequence[Row], num_front: int) -> None:
    """The numbered cells by name: the front, leanest first, then the others."""
    panel.set_axis_off()
    panel.set_title("Pareto front, leanest first" if num_front else "No cell has both figures")
    roomy = len(rows) <= 9
    line = min(0.13, 1 / (len(rows) + 0.5))
    for place, row in enumerate(rows):
        on_front = place < num_front
        top = 0.98 - (place + (0.4 if not on_front and num_front else 0)) * line
        ink = colour("ink" if on_front else "muted")
        told: dict[str, Any] = {"transform": panel.transAxes, "va": "top"}
        panel.text(0, top, f"{place + 1}", fontsize=8.5, weight="bold", color=ink, **told)
        panel.text(0.09, top, printable(row.name, NAME), fontsize=8.5, color=ink, **told)
        if roomy:
            figures = f"{size(row.peak_memory_bytes)}, {number(row.tokens_per_second)} tokens/s"
            panel.text(0.09, top - 0.052, figures, fontsize=7.5, color=colour("muted"), **told)


def steps(groups: Groups, look: dict[str, Look]) -> Drawn:
    """How even the steps are: p10 to p90 as a bar, the median as a mark, the longest step as a tick."""
    figure, axes = grid(len(groups), 1, [bars_height(cells) for _, cells in groups])
    longest = max((found["max"] for _, cells in groups for row in cells if (found := _percentiles(row))), default=1.0)
    unit, unit_name = second_unit(longest)
    for (title, cells), (panel,) in zip(groups, axes, strict=True):
        set_title(panel, f"Step time, {unit_name}", title)
        in_places(panel, cells, partial(_even, panel, look, unit))
    return Drawn(
        "steps",
        "Step times",
        "Mark: the median (p50), written beside the row. Thick bar: p10 to p90. Tick: the longest step.",
        figure,
    )


def _even(panel: Axes, look: dict[str, Look], unit: float, place: int, row: Row) -> tuple[float, float] | None:
    found = _percentiles(row)
    if found is None:
        return None
    p10, p50, p90, most = (found[key] / unit for key in ("p10", "p50", "p90", "max"))
    style = look[row.plan.id]
    panel.plot([p10, most], [place, place], color=colour("faint"), linewidth=1)
    panel.plot([p10, p90], [place, place], color=style.colour, linewidth=6, alpha=0.45, solid_capstyle="butt")
    panel.plot(p50, place, marker=style.marker, color=style.colour, markersize=7)
    panel.plot(most, place, marker="|", color=colour("ink"), markersize=9, markeredgewidth=1.4)
    return most, p50


def _percentiles(row: Row) -> dict[str, float] | None:
    found = row.record.step_seconds if row.record and row.measured else None
    return found if found and {"p10", "p50", "p90", "max"} <= found.keys() else None


def _unique(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The same figures, numbered where two have one name: axes `a.b` and `a b` are files of their own."""
    names = [one.name for one in drawn]
    again = [names[:place].count(name) for place, name in enumerate(names)]
    return [replace(one, name=f"{one.name}--{n + 1}") if n else one for one, n in zip(drawn, again, strict=True)]
