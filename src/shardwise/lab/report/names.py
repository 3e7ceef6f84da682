"""The names of cells, groups of cells, and axes in a report."""

import re
from collections.abc import Sequence

from shardwise.base.records.cell import WEAK_SCALING, Axis, CellPlan, SweepRecord
from shardwise.base.words import NOTHING, one_line

NOT_TELLING = {"none", "full", "true", "false", "auto", "null", "base"}
"""Names of values that mean something only beside the name of their axis."""


def label_of(plan: CellPlan, sweep: SweepRecord) -> str:
    """Return the name of a cell within its group: its values on the compared axes."""
    compared = [axis for axis in sweep.axes if axis.compared]
    name = named_values(plan, sweep, compared) or plan.id
    return f"control of {name}" if plan.control else name


def group_title(group: str, sweep: SweepRecord) -> str:
    """Return the title of a group: its values on the axes that are not compared.

    The title is empty where the sweep has one group.
    """
    plans = {plan.group: plan for plan in sweep.cells}
    scaling = WEAK_SCALING if group.endswith(WEAK_SCALING) else ""
    if len(plans) < 2:
        return scaling
    separating = [axis for axis in sweep.axes if not axis.compared]
    titles = {name: named_values(plan, sweep, separating) for name, plan in plans.items()}
    if not titles[group] or len(set(titles.values())) < len(titles):
        return group
    return " · ".join(filter(None, (titles[group], scaling)))


def named_values(plan: CellPlan, sweep: SweepRecord, axes: Sequence[Axis]) -> str:
    """Return a cell's values on some axes, with the name of the axis where a value needs it."""
    parts = []
    for axis in axes:
        value = plan.values.get(axis.name)
        if value is not None and len(axis.values) > 1:
            parts.append(value if _speaks_for_itself(axis, sweep) else f"{axis_name(axis)} {value}")
    return one_line(" · ".join(parts))


def _speaks_for_itself(axis: Axis, sweep: SweepRecord) -> bool:
    """Return whether the values of an axis name it: no numbers, and no names of several axes."""
    elsewhere = {value for other in sweep.axes if other.name != axis.name for value in other.values}
    return not any(is_number(value) or value in NOT_TELLING | elsewhere for value in axis.values)


def axis_name(axis: Axis) -> str:
    """Return the name of an axis in words: `micro batch size` for `training.micro_batch_size`."""
    if axis.name == "nproc":
        return "processes"
    return axis.name.rpartition(".")[2].replace("_", " ")


def is_number(value: str) -> bool:
    """Return whether the name of a value is a number."""
    return value.replace(".", "", 1).isdigit()


def fact(value: object) -> str:
    """Return a fact of an environment as text, with the first ten digits of a commit."""
    if value is None:
        return NOTHING
    return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", str(value))
