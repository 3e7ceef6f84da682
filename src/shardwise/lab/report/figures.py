"""The figures of a report, drawn from its rows. Nothing is shown by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.base.words import byte_unit, number, one_line, second_unit, size
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.curves import against, pairs_steps, rewards, routing, routing_steps
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.losses import losses, training
from shardwise.lab.report.names import group_title
from shardwise.lab.report.panels import (
    MAX_NAME,
    Drawn,
    Groups,
    bars,
    bars_height,
    comma_ticks,
    draw_legend,
    grid,
    legend,
    panel_per_group,
    peak_in,
    peak_unit,
    set_title,
    speed,
)
from shardwise.lab.report.seeds import over_seeds, spread, varies_seed
from shardwise.lab.report.shares import shares
from shardwise.lab.report.style import Look, looks
from shardwise.lab.report.tables import MEMORY_PARTS, Row, groups_of, numeric_axes, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = (
    "losses",
    "training",
    "seeds",
    "throughput-memory",
    "memory-parts",
    "plane",
    "steps",
    "sent",
    "routing",
    "experts",
)
"""The names of all figures but those along axes of numbers."""
WHISKERS = "Whiskers reach from the slowest to the fastest round. "
PERCENTILES = ("p10", "p50", "p90", "max")
MOST_LISTED = 12
"""With more cells than this, only those on the Pareto front are listed beside the plane."""
PARTS = dict(zip(MEMORY_PARTS, ("c1", "c2", "c3", "c4", "c7"), strict=True))
"""The colour of each part of the memory."""
HATCHES = ("", "////", "....", "xxxx", "----")
"""The hatch of each part of the memory."""


def draw_all(bench: BenchFolder, rows: Sequence[Row]) -> list[Drawn]:
    """Draw every figure for which there are data, in the page's order. Call this in `drawing()`."""
    look = looks(bench.sweep, rows)
    groups, without_controls = [], []
    for group, cells in groups_of(rows).items():
        title = group_title(group, bench.sweep)
        groups.append((title, cells))
        without_controls.append((title, [row for row in cells if not row.plan.control]))
    drawn = []
    if any(row.record and row.record.losses for row in rows):
        drawn.append(losses(groups, look))
    if any(row.validation or (row.record and row.record.grad_norms) for row in rows):
        drawn.append(training(groups, look))
    if seeds := over_seeds(bench, rows):
        drawn.append(spread(seeds))
    if any(row.tokens_per_second or row.peak_memory_bytes for row in rows):
        drawn.append(throughput_and_memory(without_controls, look))
        # Seeds are numbers, but no quantity.
        axes = [axis for axis in numeric_axes(bench.sweep, rows) if not varies_seed(axis)]
        drawn += _with_unique_names([against(bench, axis, rows) for axis in axes])
    if any(row.memory_parts for row in rows):
        drawn.append(memory(without_controls))
    if any(_with_both_figures(cells) for _, cells in without_controls):
        drawn.append(plane(without_controls, look))
    if _timed(rows):
        drawn.append(steps(without_controls, look))
    if any(row.sent_bytes or row.predicted_bytes for row in rows):
        drawn.append(sent(without_controls, look))
    if any(map(pairs_steps, rows)):
        drawn.append(rewards(without_controls, look))
    if any(map(routing_steps, rows)):
        drawn.append(routing(without_controls, look))
    if any(row.routing and row.routing.share for row in rows):
        drawn.append(shares(without_controls))
    return drawn


def _with_unique_names(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Return the figures with numbers after repeated names, as of the axes `a.b` and `a b`."""
    names = [one.name for one in drawn]
    unique = []
    for place, one in enumerate(drawn):
        num_before = names[:place].count(one.name)
        unique.append(replace(one, name=f"{one.name}--{num_before + 1}") if num_before else one)
    return unique


def throughput_and_memory(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw a bar for the peak memory of each cell, and one for its throughput if one is timed."""
    all_cells = [row for _, cells in groups for row in cells]
    timed = any(row.tokens_per_second for row in all_cells)
    heights = [bars_height(cells) for _, cells in groups]
    figure, panels = grid(len(groups), 2 if timed else 1, heights)
    unit, unit_name = peak_unit(all_cells)
    for (title, cells), (*left, right) in zip(groups, panels, strict=True):
        for panel in left:
            set_title(panel, "Throughput, tokens/s", title)
            bars(panel, cells, look, speed, lambda row: row.tokens_range)
            right.tick_params(labelleft=False)
        set_title(right, f"Peak memory, {unit_name}", "" if left else title)
        bars(right, cells, look, peak_in(unit))
    return Drawn(
        "throughput-memory",
        "Throughput and peak memory" if timed else "Peak memory",
        f"Bars are medians over the rounds. {WHISKERS if timed else ''}"
        "Memory is that of the rank with the most. A dashed line marks the baseline.",
        figure,
    )


# --------------------------------------------------------------------------------- memory parts


def memory(groups: Groups) -> Drawn:
    """Draw the parts of each cell's peak memory as a stacked bar."""
    unit, unit_name = peak_unit(row for _, cells in groups for row in cells)

    def draw(panel: Axes, place: int, row: Row) -> tuple[float, str] | None:
        if row.memory_parts is None:
            return None
        end = 0.0
        for (part, fill), hatch in zip(PARTS.items(), HATCHES, strict=True):
            style: dict[str, Any] = {"color": colour(fill), "hatch": hatch, "linewidth": 0}
            width = row.memory_parts[part] / unit
            panel.barh(place, width, left=end, height=0.66, label=part, **style)
            end += width
        return end, number(end)

    figure, panels = panel_per_group(groups, f"Peak memory, {unit_name}", draw)
    handles = {}
    for panel in panels:
        for handle, part in zip(*panel.get_legend_handles_labels(), strict=True):
            handles[part] = handle
    draw_legend(figure, list(handles.values()), list(handles))
    return Drawn(
        "memory-parts",
        "What the memory is",
        "The parts at the peak of the first good round, on the rank with the largest peak. The "
        "number is their sum, which may differ from the median over the rounds. Temporary is "
        "memory that no tensor of another part holds.",
        figure,
    )


# ---------------------------------------------------------------------------------- the plane


def plane(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw each cell at its memory and throughput, and the Pareto front, with a list of cells."""
    listed = [_listed(cells) for _, cells in groups]
    heights = [max(2.8, 0.36 * len(cells)) for cells in listed]
    figure, panels = grid(len(groups), 2, heights, [1.6, 1.0])
    unit, unit_name = peak_unit(row for _, cells in groups for row in cells)
    unlisted = []
    for (title, cells), in_list, (panel, beside) in zip(groups, listed, panels, strict=True):
        panel.set_title(title)
        both = _with_both_figures(cells)
        unlisted += [row for row in both if row not in in_list]
        marks = _draw_plane(panel, both, pareto(cells), look, unit)
        panel.set_xlabel(f"peak memory, {unit_name}   (← less is better)")
        panel.set_ylabel("tokens/s   (more is better →)")
        _draw_list(beside, in_list, marks)
    legend(figure, unlisted, look, {}, dashes=False)
    return Drawn(
        "plane",
        "Throughput against memory",
        "Filled marks are on the Pareto front: no other cell of the group is at least as good in "
        "both and better in one. All other marks are hollow, and so are those of unchecked cells "
        "beside checked ones, as nothing shows that they computed the right thing.",
        figure,
    )


def _with_both_figures(cells: Sequence[Row]) -> list[Row]:
    """Return the cells with both a throughput and a peak memory."""
    return [row for row in cells if row.tokens_per_second and row.peak_memory_bytes]


def _listed(cells: Sequence[Row]) -> list[Row]:
    """Return the cells in the list beside the plane: the front, then all others if they are few."""
    front, both = pareto(cells), _with_both_figures(cells)
    if len(both) > MOST_LISTED:
        return front
    return front + [row for row in both if row not in front]


def _draw_plane(
    panel: Axes, cells: Sequence[Row], front: Sequence[Row], look: dict[str, Look], unit: float
) -> dict[str, Any]:
    """Draw the Pareto front and a mark for each cell, and return the marks by the cells' ids.

    Memory is in units of `unit` bytes.
    """
    peak = peak_in(unit)
    places = {row.plan.id: (peak(row) or 0.0, speed(row) or 0.0) for row in cells}
    on_front = [places[row.plan.id] for row in front]
    line: dict[str, Any] = {"color": colour("accent"), "linewidth": 1.4, "zorder": 1}
    panel.step([x for x, _ in on_front], [y for _, y in on_front], where="post", **line)
    marks = {}
    for row in cells:
        style = look[row.plan.id]
        fill = style.colour if row in front else colour("paper")
        mark: dict[str, Any] = {"marker": style.marker, "markersize": 7, "markerfacecolor": fill}
        mark |= {"markeredgecolor": style.colour, "markeredgewidth": 1.3, "linestyle": "none"}
        (marks[row.plan.id],) = panel.plot(*places[row.plan.id], **mark)
    # Axes begin at 0, so that distances are true: on a cut axis 1% looks like half.
    panel.set_xlim(0, 1.14 * max((x for x, _ in places.values()), default=1.0))
    panel.set_ylim(0, 1.16 * max((y for _, y in places.values()), default=1.0))
    comma_ticks(panel.xaxis)
    comma_ticks(panel.yaxis)
    return marks


def _draw_list(panel: Axes, cells: Sequence[Row], marks: dict[str, Any]) -> None:
    """Write the names and figures of cells beside their marks."""
    panel.set_axis_off()
    panel.set_title("Pareto front first" if cells else "No cell has both figures")
    names = []
    for row in cells:
        figures = f"{size(row.peak_memory_bytes)}, {number(row.tokens_per_second)} tokens/s"
        names.append(f"{one_line(row.name, MAX_NAME)}\n{figures}")
    handles = [marks[row.plan.id] for row in cells]
    panel.legend(handles, names, loc="upper left", borderaxespad=0, fontsize=8)


# --------------------------------------------------------------------------------- step times


def steps(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw the median, the spread from p10 to p90, and the longest of each cell's step times."""
    longest_steps = [row.step_seconds["max"] for _, cells in groups for row in _timed(cells)]
    unit, unit_name = second_unit(max(longest_steps, default=1.0))

    def draw(panel: Axes, place: int, row: Row) -> tuple[float, str] | None:
        if not _timed([row]):
            return None
        p10, p50, p90, longest = (row.step_seconds[key] / unit for key in PERCENTILES)
        style = look[row.plan.id]
        tick: dict[str, Any] = {"marker": "|", "markersize": 9, "markeredgewidth": 1.4}
        bar: dict[str, Any] = {"linewidth": 6, "alpha": 0.45, "solid_capstyle": "butt"}
        panel.plot([p10, longest], [place, place], color=colour("faint"), linewidth=1)
        panel.plot([p10, p90], [place, place], color=style.colour, **bar)
        panel.plot(p50, place, marker=style.marker, color=style.colour, markersize=7)
        panel.plot(longest, place, color=colour("ink"), **tick)
        return longest, number(p50)

    figure, _ = panel_per_group(groups, f"Step time, {unit_name}", draw)
    return Drawn(
        "steps",
        "Step times",
        "The mark and the number are the median (p50). The thick bar reaches from p10 to p90. "
        "The tick is the longest step.",
        figure,
    )


# --------------------------------------------------------------------------------- bytes sent


def sent(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw what leaves the rank of each cell that sends most, counted and by formula."""
    both = [(row.sent_bytes or 0, row.predicted_bytes or 0) for _, cells in groups for row in cells]
    unit, unit_name = byte_unit(max(map(max, both), default=1))

    def draw(panel: Axes, place: int, row: Row) -> tuple[float, str] | None:
        counted, predicted = row.sent_bytes, row.predicted_bytes
        if counted is not None:
            fill = look[row.plan.id].colour
            panel.barh(place, counted / unit, height=0.62, color=fill, linewidth=0)
        if predicted is not None:
            tick: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2}
            panel.plot(predicted / unit, place, color=colour("ink"), clip_on=False, **tick)
        values = [value for value in (counted, predicted) if value is not None]
        if not values:
            return None
        text = size(values[0])
        return max(values) / unit, text if counted is not None else f"{text} by formula"

    figure, _ = panel_per_group(groups, f"Sent by a rank in a step, {unit_name}", draw)
    return Drawn(
        "sent",
        "Bytes sent",
        "What leaves the rank that sends most in a training step, every collective counted as a "
        "ring. The bar and the number are counted in the last step of the warm-up. The tick is "
        "what the formulas of shardwise plan say; they take routers to give each rank's experts "
        "equally many tokens.",
        figure,
    )


def _timed(cells: Sequence[Row]) -> list[Row]:
    """Return the cells that have step times."""
    return [row for row in cells if row.step_seconds.keys() >= set(PERCENTILES)]
