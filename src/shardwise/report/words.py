"""How cells and figures are written: names, units, and a sensible number of digits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.records.cell import WEAK_SCALING, Axis, CellPlan, SweepRecord

NOTHING = "–"
"""Stands where nothing was measured."""
SAYS_NOTHING = {"none", "full", "true", "false", "auto", "null", "base"}
"""Names of values that mean something only beside the name of their axis."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def label_of(plan: CellPlan, sweep: SweepRecord) -> str:
    """What a cell is called within its group: its values on the compared axes."""
    name = named_values(plan, sweep, [axis for axis in sweep.axes if axis.compared]) or plan.id
    return f"control of {name}" if plan.control else name


def group_title(group: str, sweep: SweepRecord) -> str:
    """What sets a group apart: its values on the axes that are not compared, and whether it scales weakly.

    Empty where there is one group alone, of cells that were given the same work.
    """
    plans = {plan.group: plan for plan in sweep.cells}
    if len(plans) < 2:
        return WEAK_SCALING if group.endswith(WEAK_SCALING) else ""
    apart = [axis for axis in sweep.axes if not axis.compared]
    titles = {name: named_values(plan, sweep, apart) for name, plan in plans.items()}
    if not titles[group] or len(set(titles.values())) < len(titles):
        return group
    return f"{titles[group]} · {WEAK_SCALING}" if group.endswith(WEAK_SCALING) else titles[group]


def named_values(plan: CellPlan, sweep: SweepRecord, axes: Sequence[Axis]) -> str:
    """A cell's values on these axes of its sweep; those that do not explain themselves say of what they are."""
    words = []
    for axis in axes:
        value = plan.values.get(axis.name)
        if value is not None and len(axis.values) > 1:
            words.append(value if _explain_themselves(axis, sweep) else f"{axis_name(axis)} {value}")
    return printable(" · ".join(words))


def _explain_themselves(axis: Axis, sweep: SweepRecord) -> bool:
    """Whether the names of an axis's values tell what they are of: not so a number, or what another axis has too."""
    others = {value for other in sweep.axes if other.name != axis.name for value in other.values}
    return not any(is_number(value) or value in SAYS_NOTHING or value in others for value in axis.values)


def axis_name(axis: Axis) -> str:
    """An axis in words: `training.micro_batch_size` is the micro batch size."""
    return "processes" if axis.name == "nproc" else axis.name.rpartition(".")[2].replace("_", " ")


def is_number(value: str) -> bool:
    """Whether a value's name is a number."""
    return value.replace(".", "", 1).isdigit()


def printable(text: str, longest: int = 60) -> str:
    """A name on one line, without what a figure or a table cannot show; what is too long loses its middle."""
    text = "".join(c if c.isprintable() else " " for c in text)
    head, tail = (longest - 1) // 2, longest - 1 - (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:head]}…{text[-tail:]}"


def number(value: float | None) -> str:
    """Three digits that mean something, thousands apart: 1,309 or 86.7 or 0.0123; 80 rather than 80.0."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    whole, _, decimals = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}".partition(".")
    return f"{whole}.{decimals}" if decimals.strip("0") else whole


def scientific(value: float | None) -> str:
    """A very small number: 4.8×10⁻⁷, and a plain 0."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}" if value else "0"


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit in which the largest of some sizes has one to four digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= unit:
            return float(unit), name
    return 1.0, "bytes"


def size(num_bytes: float | None) -> str:
    """61.4 MiB."""
    if num_bytes is None:
        return NOTHING
    unit, name = byte_unit(num_bytes)
    return f"{number(num_bytes / unit)} {name}"


def second_unit(largest: float) -> tuple[float, str]:
    """The unit in which the largest of some times has one to three digits."""
    return (1.0, "s") if largest >= 1 else (1e-3, "ms")


def seconds(value: float | None) -> str:
    """812 ms or 1.23 s."""
    if value is None:
        return NOTHING
    unit, name = second_unit(value)
    return f"{number(value / unit)} {name}"


def times(value: float | None) -> str:
    """1.51×."""
    return NOTHING if value is None else f"{value:.2f}×"


def percent(value: float | None, decimals: int = 0) -> str:
    """58 %, with a real minus sign."""
    return NOTHING if value is None else f"{value * 100:.{decimals}f} %".replace("-", "−")


def span(low_high: tuple[float, float] | None) -> str:
    """From the smallest to the largest of the rounds."""
    return NOTHING if low_high is None else f"{number(low_high[0])} – {number(low_high[1])}"


def fact(value: object) -> str:
    """A fact of an environment; a commit by its first ten digits."""
    return NOTHING if value is None else re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", str(value))
