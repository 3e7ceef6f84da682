"""The figures of losses: over the steps, how far they differ, validation and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardwise.base.words import scientific
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report.curves import CONTROL, WRONG, draw_steps, line_style
from shardwise.lab.report.panels import (
    Drawn,
    Groups,
    bars_height,
    grid,
    in_places,
    legend,
    set_title,
)
from shardwise.lab.report.style import Look
from shardwise.lab.report.tables import Row
from shardwise.lab.report.verdict import spacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION = (
    "Left: the loss of every step. The curves of cells that do the same work coincide. The wide "
    "pale curve is the reference. Right: how far each cell's losses are from those of the "
    "reference. The large mark and the number are the largest difference at any step; the dots are "
    "the steps, the first one on top. Up to one rounding (the spacing of float32 at the largest "
    "loss) the axis is linear, then logarithmic. The grey band reaches to the difference of the "
    "noise control, which is the reference with its micro-batches in reverse and its weights moved "
    "by one rounding. The tolerance is ten times as far. A cell beyond it is wrong. A reference "
    "with other numerics is compared with the baseline, as closely as its number format allows."
)
VALIDATION_CAPTION = (
    "Left: the loss on the validation rows, at each evaluation; step 0 is before training, and the "
    "numbers are the smallest and the largest of all cells. Right: "
)
NORMS_CAPTION = (
    "The global norm of the gradients before clipping, of every step. Curves of cells that do the "
    "same work coincide."
)
TOLERANCE: dict[str, Any] = {"color": colour("bad"), "linewidth": 1.3, "linestyle": (0, (3, 1.5))}
NOISE: dict[str, Any] = {"color": colour("faint"), "alpha": 0.3, "linewidth": 0}
LEAST_RANGE = 0.01
"""The least range of an axis of validation losses, so that no rounding looks like a difference."""
MOST_DOTS = 40
"""The most dots of a cell: with more steps, each is the largest difference of several steps."""


def losses(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw the losses of each group, and beside them how far they are from the reference's."""
    shown = []
    for title, cells in groups:
        with_losses = [row for row in cells if row.record and row.record.losses]
        if with_losses:
            shown.append((title, with_losses))
    heights = [max(2.6, bars_height(cells)) for _, cells in shown]
    figure, panels = grid(len(shown), 2, heights, [1.1, 1.0])
    for (title, cells), (left, right) in zip(shown, panels, strict=True):
        set_title(left, "Loss", title)
        draw_steps(left, cells, look, lambda row: row.record.losses if row.record else [])
        set_title(right, "Difference from the reference", "")
        _draw_differences(right, cells, look)

    all_cells = [row for _, cells in shown for row in cells]
    special = _special(all_cells)
    if any(row.difference is not None for row in all_cells):
        special["within the noise"] = NOISE | {"linewidth": 9}
        special["tolerance"] = TOLERANCE
    legend(figure, _ordinary(all_cells), look, special)
    return Drawn("losses", "The same losses", CAPTION, figure)


def _ordinary(cells: Sequence[Row]) -> list[Row]:
    """Return the cells whose curves have a colour of their own."""
    return [row for row in cells if row.state != "wrong" and not row.plan.control]


def _special(cells: Sequence[Row]) -> dict[str, Mapping[str, Any]]:
    """Return the line styles of controls and of wrong cells by name, where there are some."""
    special: dict[str, Mapping[str, Any]] = {}
    if any(row.plan.control for row in cells):
        special["noise control"] = CONTROL
    if any(row.state == "wrong" for row in cells):
        special["wrong"] = WRONG
    return special


# ---------------------------------------------------------------------------- differences


def _draw_differences(panel: Axes, cells: Sequence[Row], look: dict[str, Look]) -> None:
    """Draw the differences of each cell's losses from those that they are compared with."""
    losses_of = {row.plan.id: row.record.losses for row in cells if row.record}
    noise = {row.plan.reference: row.difference for row in cells if row.plan.control}
    all_losses = [abs(loss) for cell_losses in losses_of.values() for loss in cell_losses]
    rounding = spacing(max(filter(math.isfinite, all_losses), default=1.0) or 1.0)

    def draw(place: int, row: Row) -> tuple[float, str] | None:
        _draw_limits(panel, place, row, noise.get(row.plan.reference or row.plan.id))
        if row.difference is None or not math.isfinite(row.difference) or row.verdict is None:
            return None
        style = line_style(row, look[row.plan.id])
        others = losses_of.get(row.verdict.against or "", [])
        dots = _dots([abs(a - b) for a, b in zip(losses_of[row.plan.id], others)])
        heights = [place - 0.3 + 0.6 * (i + 0.5) / len(dots) for i in range(len(dots))]
        small: dict[str, Any] = {"marker": "o", "markersize": 2, "alpha": 0.55, "linestyle": "none"}
        panel.plot(dots, heights, color=style["color"], clip_on=False, **small)
        mark: dict[str, Any] = {"marker": style["marker"], "markersize": 6, "color": style["color"]}
        panel.plot(row.difference, place, clip_on=False, **mark)
        return row.difference, _in_roundings(row.difference, rounding)

    def reason(row: Row) -> str:
        return "the reference" if row.is_reference else "not compared"

    farthest = in_places(panel, cells, draw, reason)
    tolerances = [row.tolerance for row in cells if row.tolerance]
    _set_scale(panel, rounding, max(farthest, *tolerances, 10 * rounding))
    panel.tick_params(axis="y", pad=8)  # room for marks at 0


def _draw_limits(panel: Axes, place: int, row: Row, noise: float | None) -> None:
    """Draw the band of the noise control and the tolerance in the place of a cell."""
    ends = place - 0.5, place + 0.5
    if noise and math.isfinite(noise):
        panel.fill_betweenx(ends, 0, noise, zorder=0.4, **NOISE)
    if row.tolerance:
        panel.plot([row.tolerance] * 2, ends, zorder=0.6, **TOLERANCE)


def _dots(differences: Sequence[float]) -> list[float]:
    """Return the differences of all steps, or the largest ones of MOST_DOTS spans of steps."""
    number = min(MOST_DOTS, len(differences))
    ends = [len(differences) * i // number for i in range(number + 1)]
    return [max(differences[low:high]) for low, high in pairwise(ends)]


def _in_roundings(difference: float, rounding: float) -> str:
    """Return a difference as text, with the number of roundings that it is where they are few."""
    if not difference:
        return "0, bit for bit"
    number = difference / rounding
    text = scientific(difference)
    if number > 100:
        return text
    return f"{text}, {number:.2g} rounding{'s' if number != 1 else ''}"


def _set_scale(panel: Axes, rounding: float, farthest: float) -> None:
    """Make the horizontal axis linear up to one rounding, and logarithmic beyond."""
    decades = math.log10(farthest / rounding)
    panel.set_xscale("symlog", linthresh=rounding, linscale=0.2 * decades)
    end = farthest * 10 ** (0.45 * decades)
    first, last = math.ceil(math.log10(rounding)), math.floor(math.log10(end))
    powers = range(first, last + 1, max(1, -(-(last - first) // 4)))
    labels = ["0", *(f"1e{power:+03d}" for power in powers)]
    panel.set_xticks([0.0, *(10.0**power for power in powers)], labels)
    panel.set_xticks([], minor=True)
    panel.set_xlim(0, end)
    panel.set_xlabel("difference of the loss")


# ------------------------------------------------------------------ validation and gradients


def training(groups: Groups, look: dict[str, Look]) -> Drawn:
    """Draw the gradient norms of each group, and its validation losses if a cell has some."""
    shown = []
    for title, cells in groups:
        with_numbers = [row for row in cells if row.validation or _norms(row)]
        if with_numbers:
            shown.append((title, with_numbers))
    all_cells = [row for _, cells in shown for row in cells]
    evaluated = any(row.validation for row in all_cells)
    figure, panels = grid(len(shown), 2 if evaluated else 1, [2.4] * len(shown))
    for (title, cells), (*left, right) in zip(shown, panels, strict=True):
        for panel in left:
            set_title(panel, "Validation loss", title)
            _draw_validation(panel, cells, look)
        set_title(right, "Gradient norm", "" if left else title)
        draw_steps(right, [row for row in cells if _norms(row)], look, _norms)
        right.set_ylim(bottom=0)
    legend(figure, _ordinary(all_cells), look, _special(all_cells))
    if not evaluated:
        return Drawn("training", "Gradient norms", NORMS_CAPTION, figure)
    caption = VALIDATION_CAPTION + NORMS_CAPTION[0].lower() + NORMS_CAPTION[1:]
    return Drawn("training", "Validation loss and gradient norms", caption, figure)


def _norms(row: Row) -> Sequence[float]:
    return row.record.grad_norms if row.record else []


def _draw_validation(panel: Axes, cells: Sequence[Row], look: dict[str, Look]) -> None:
    """Draw the losses of all evaluations, with the numbers of the first and of the last one."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    at: dict[int, list[float]] = {}
    for row in cells:
        panel.plot(*zip(*row.validation), **line_style(row, look[row.plan.id]))
        for step, loss in row.validation:
            if math.isfinite(loss) and row.state != "wrong":
                at.setdefault(step, []).append(loss)
    if not at:
        text: dict[str, Any] = {"transform": panel.transAxes, "ha": "center", "style": "italic"}
        panel.text(0.5, 0.5, "not evaluated", color=colour("muted"), **text)
        panel.set(xticks=[], yticks=[])
        return
    write = partial(panel.annotate, textcoords="offset points", fontsize=8.5)
    first, last = min(at), max(at)
    falls = 1 if max(at[last]) <= max(at[first]) else -1
    for step in {first, last}:
        ends = dict.fromkeys(f"{loss:.4f}" for loss in (min(at[step]), max(at[step])))
        # Where the curve does not run: above the first point and below the last one if it falls.
        beside: dict[str, Any] = {"xytext": (8, 8 * falls), "ha": "left"}
        if step == last:
            beside = {"xytext": (-8, -8 * falls), "ha": "right"}
        write(" – ".join(ends), (step, max(at[step])), va="center", **beside)
    panel.margins(x=0.06, y=0.2)
    low, high = panel.get_ylim()
    if high - low < LEAST_RANGE:
        panel.set_ylim((low + high - LEAST_RANGE) / 2, (low + high + LEAST_RANGE) / 2)
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.set_xlabel("step")
