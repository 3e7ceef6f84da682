"""The figures that are lines: losses over the steps, and speed and memory along an axis of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.drawing.svg import colour
from shardwise.records.cell import Axis
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    BESIDE,
    CONTROL,
    WRONG,
    Drawn,
    Groups,
    bars_height,
    comma_ticks,
    grid,
    legend,
    line_style,
    name_places,
    peak_in,
    peak_unit,
    set_title,
    speed,
    whole_steps,
)
from shardwise.report.style import Look, looks
from shardwise.report.tables import Row, number_of, scaling_kind
from shardwise.report.words import axis_name, named_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGAINST = "against-"
"""How the names of figures along an axis begin."""


def losses(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Loss curves on one another; beside them, of each cell the largest difference as a share of its tolerance."""
    shown = [(title, [row for row in cells if row.record and row.record.losses]) for title, cells in groups]
    shown = [(title, cells) for title, cells in shown if cells]
    figure, axes = grid(len(shown), 2, [max(2.6, bars_height(cells)) for _, cells in shown], [1.25, 1.0])
    for (title, cells), (left, right) in zip(shown, axes, strict=True):
        set_title(left, "Loss", title)
        for index, row in enumerate(cells):
            assert row.record is not None
            x = range(1, len(row.record.losses) + 1)
            every = max(1, len(x) // 6)
            style = line_style(row, look[row.plan.id])
            left.plot(x, row.record.losses, markevery=(index % every, every), **style)
        whole_steps(left)
        set_title(right, "Difference ÷ tolerance", "")
        _differences(right, cells, look)
    cells = [row for _, cells in shown for row in cells]
    special = {"noise control": CONTROL} if any(row.plan.control for row in cells) else {}
    special |= {"wrong": WRONG} if any(row.state == "wrong" for row in cells) else {}
    legend(figure, [row for row in cells if row.state != "wrong" and not row.plan.control], look, special)
    return Drawn(
        "losses",
        "The same losses",
        "Left: the loss of every step. Curves of cells that do the same work lie on one another; the broad pale one is "
        "the reference. Right: the largest difference at any step from the loss of the reference, in units of the "
        "tolerance; a cell beyond the line is wrong. The noise control is the reference with its micro-batches in "
        "reverse and its weights moved by a rounding, and the tolerance is ten times what that alone does. A reference "
        "of other numerics is measured against the baseline, as closely as its format allows.",
        figure,
    )


def _differences(panel: Axes, cells: Sequence[Row], look: dict[str, Look]) -> None:
    """A place for each cell: how far its losses are from its reference's, in units of its tolerance.

    The axis begins at 0 and is even up to 1, the tolerance; if a cell is beyond, it goes on by powers of ten.
    """
    shares = {row.plan.id: share for row in cells if (share := _share_of_tolerance(row)) is not None}
    beside: dict[str, Any] = {**BESIDE, "xytext": (8, 0)}
    farthest = max([share for share in shares.values() if math.isfinite(share)], default=0.0)
    for place, row in enumerate(cells):
        share = shares.get(row.plan.id)
        style = line_style(row, look[row.plan.id])
        wrong = row.state == "wrong"
        if share is None or not math.isfinite(share):
            told = "✗ wrong" if wrong else "the reference" if row.is_reference else "not compared"
            panel.annotate(told, (0, place), color=colour("bad" if wrong else "muted"), fontsize=8.5, **beside)
            continue
        ink: dict[str, Any] = {"color": style["color"]}
        panel.plot([0, share], [place, place], linewidth=1.6, linestyle="solid", **ink)
        panel.plot(share, place, marker=style["marker"], markersize=6, clip_on=False, **ink)
        panel.annotate(f"{share:,.2g}" if share < 100 else f"{share:,.0f}", (share, place), fontsize=8.5, **beside)
    panel.axvline(1, color=colour("bad"), linewidth=1.1, dashes=(4, 2), zorder=0.6)
    if farthest > 1:
        decades = math.ceil(math.log10(farthest)) or 1
        panel.set_xscale("symlog", linthresh=1, linscale=decades / 2)  # a third of the width is up to 1
        powers = range(1, decades + 1, max(1, decades // 3))
        panel.set_xticks([0, 1, *(10.0**power for power in powers)])
        panel.set_xticklabels(["0", "1", *(f"{10**power:,}" for power in powers)])
        panel.set_xlim(0, farthest * 10 ** (0.35 * decades))
    else:
        panel.set_xlim(0, 1.3)
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    panel.set_xlabel("1: the tolerance, beyond which a cell is wrong")
    panel.tick_params(axis="y", pad=8)  # room for marks at 0
    name_places(panel, [f"✗ {row.label}" if row.state == "wrong" else row.name for row in cells])


def _share_of_tolerance(row: Row) -> float | None:
    verdict = row.verdict
    if verdict is None or verdict.departure is None or not verdict.tolerance:
        return None
    return verdict.departure / verdict.tolerance


def against(bench: Bench, axis: Axis, rows: Sequence[Row]) -> Drawn:
    """Throughput and peak memory along an axis of numbers, a line for each combination of the other compared values."""
    cells = [row for row in rows if not row.plan.control]
    look = looks(bench.sweep, cells, apart_from=axis.name)
    work = [other for other in bench.sweep.axes if other.name != axis.name and not other.compared]
    lines: dict[str, dict[Look, list[Row]]] = {}
    for row in cells:
        lines.setdefault(named_values(row.plan, bench.sweep, work), {}).setdefault(look[row.plan.id], []).append(row)
    figure, axes = grid(len(lines), 2, [2.7] * len(lines))
    unit, unit_name = peak_unit(rows)
    name = "processes" if "nproc" in axis.keys else axis_name(axis)
    ticks = sorted({number_of(axis, row) or 0.0 for row in cells})
    for (title, of_title), (left, right) in zip(lines.items(), axes, strict=True):
        set_title(left, "Throughput, tokens/s", title)
        set_title(right, f"Peak memory, {unit_name}", "")
        for style, of_line in of_title.items():
            for panel, read in ((left, speed), (right, peak_in(unit))):
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
                for row in of_line:
                    if row.state == "unchecked" and (y := read(row)):
                        x = number_of(axis, row) or 0.0
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
    legend(figure, cells, look, {})
    ideal = f" Thin dashes: {scaling_kind(bench.sweep)} scaling as it would ideally be." if name == "processes" else ""
    unchecked = " Marks with a hole are unchecked." if any(row.state == "unchecked" for row in cells) else ""
    return Drawn(
        f"{AGAINST}{''.join(c if c.isalnum() else '-' for c in axis.name)}",
        f"Against {name}",
        f"Cells without a figure are left out of the lines; the table of all cells has the reason.{ideal}{unchecked}",
        figure,
    )
