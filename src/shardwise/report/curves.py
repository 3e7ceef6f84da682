"""The figures that are lines: losses over the steps, and speed and memory along an axis of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.metrics.cell import Axis
from shardwise.report.folder import Bench
from shardwise.report.panels import (
    CONTROL,
    WRONG,
    Drawn,
    Groups,
    comma_ticks,
    grid,
    legend,
    line_style,
    peak_in,
    peak_unit,
    set_title,
    speed,
    whole_steps,
)
from shardwise.report.style import Look, colour, looks
from shardwise.report.tables import Row, number_of, scaling_kind
from shardwise.report.words import axis_name, named_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGAINST = "against-"
"""How the names of figures along an axis begin."""
FLOOR = 1e-3
"""Share of the tolerance below which a departure is drawn as 0."""


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
            verdict = row.verdict
            reference = by_id.get(verdict.against or "") if verdict else None
            allowed = verdict.tolerance if verdict else None
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
        if not any(row.verdict and row.verdict.tolerance for row in cells):
            nothing = "no cell to compare these with"
            right.text(0.5, 0.35, nothing, transform=right.transAxes, ha="center", color=colour("muted"))
        for panel in (left, right):
            whole_steps(panel)
    cells = [row for _, cells in shown for row in cells]
    special = {"noise control": CONTROL} if any(row.plan.control for row in cells) else {}
    special |= {"wrong": WRONG} if any(row.state == "wrong" for row in cells) else {}
    legend(figure, [row for row in cells if row.state != "wrong" and not row.plan.control], look, special)
    return Drawn(
        "losses",
        "The same losses",
        "Left: the loss of every step. Curves of cells that do the same work lie on one another; the broad pale one is "
        "the reference. Right: how far each "
        "is from its reference; the noise control is the reference with its micro-batches in another order, "
        "and the tolerance is ten times what that alone does. A reference of other numerics is measured against the "
        "baseline, as closely as its format allows.",
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
