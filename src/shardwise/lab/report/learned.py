"""Losses along an axis that changes the computation itself, such as the learning rate."""

from collections.abc import Sequence

from shardwise.base.records.cell import Axis, SweepRecord
from shardwise.config.keys import all_keys, facts_of
from shardwise.lab.report.names import named_values
from shardwise.lab.report.seeds import varies_seed
from shardwise.lab.report.tables import GLOBAL_BATCH, Row


def changes_losses(axis: Axis) -> bool:
    """Return whether an axis varies what is computed, at the same time for a step.

    Losses tell its values apart, and speeds do not. A seed is left to its own figure.
    """
    keys = set(axis.keys)
    if varies_seed(axis) or GLOBAL_BATCH in keys or not keys <= {*all_keys()}:
        return False
    return all(facts_of(key).decides == "work" and not facts_of(key).timed for key in keys)


def last_and_best(rows: Sequence[Row]) -> tuple[str, dict[str, tuple[float, float]]]:
    """Return a kind of loss, and by cell the last and the lowest one.

    They are validation losses where each cell has one after step 0, else losses of training.
    """
    shown = [row for row in rows if row.measured and row.record and row.record.losses]
    after = {row.plan.id: [loss for step, loss in row.validation if step] for row in shown}
    if all(after.values()):
        return "validation loss", {name: (read[-1], min(read)) for name, read in after.items()}
    losses = {row.plan.id: row.record.losses for row in shown if row.record}
    return "training loss", {name: (read[-1], min(read)) for name, read in losses.items()}


def lowest(sweep: SweepRecord, rows: Sequence[Row]) -> list[str]:
    """Return a sentence on the cell with the lowest loss, where an axis changes the losses."""
    kind, losses = last_and_best(rows)
    if len(losses) < 2 or not any(changes_losses(axis) for axis in sweep.axes):
        return []
    best = min((row for row in rows if row.plan.id in losses), key=lambda r: losses[r.plan.id][1])
    name = named_values(best.plan, sweep, sweep.axes)
    return [f"Lowest {kind}: {name} ({losses[best.plan.id][1]:.4f})."]
