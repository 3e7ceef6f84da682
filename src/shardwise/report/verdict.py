"""Whether a cell computed the right thing: its losses against another's, as closely as rounding allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.records.cell import CellPlan, CellRecord, SweepRecord
from shardwise.report.words import scientific

NOISE_FACTOR = 10.0
"""A control is one draw of what rounding does to a loss; a real mistake moves it a thousand times further."""


@dataclass(frozen=True)
class Verdict:
    """On one cell that ran to its end."""

    state: Literal["ok", "unchecked", "wrong"]
    reason: str = ""
    against: str | None = None  # id of the cell that its losses were compared with
    departure: float | None = None  # largest |loss - that cell's| over the steps; NaN where a loss is
    tolerance: float | None = None  # of that departure; of a baseline, what it allows others


def spacing(loss: float) -> float:
    """The distance from |loss| to the next float32 above it: 2^(exponent - 23)."""
    return 2.0 ** (math.frexp(loss)[1] - 24)


def departure(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest distance at any step; NaN if any loss is not finite. Both have the same number of steps."""
    if not all(map(math.isfinite, losses)):
        return math.nan
    return max((abs(a - b) for a, b in zip(losses, reference, strict=True)), default=0.0)


def tolerance(reference: Sequence[float], control: Sequence[float]) -> float:
    """What rounding may do: the control's own departure, at least float32's spacing at the largest loss, tenfold."""
    return NOISE_FACTOR * max(departure(control, reference), spacing(max(map(abs, reference))))


def coarse(a: CellRecord, b: CellRecord) -> float:
    """What no rounding explains between cells that round differently, or whose noise is not known.

    2^-7 of the largest loss where either stores or computes in bfloat16, which has 8 bits, 2^-10 where in float16,
    which has 11 and loses some to scaled sums; else 1e-3.
    """
    formats = {setting(record, *key) for record in (a, b) for key in (("model", "dtype"), ("training", "precision"))}
    largest = max(map(abs, b.losses))
    return 2**-7 * largest if "bfloat16" in formats else 2**-10 * largest if "float16" in formats else 1e-3


def setting(record: CellRecord | None, section: str, key: str) -> Any:
    """A value of a record's config; None where it has none, as of a run that was refused."""
    found = record.config.get(section) if record else None
    return found.get(key) if isinstance(found, dict) else None


def verdicts(sweep: SweepRecord, records: Mapping[str, CellRecord]) -> dict[str, Verdict]:
    """The verdict on each cell, controls too, that ran to its end."""
    found: dict[str, Verdict] = {}
    controls = {plan.reference: plan.id for plan in sweep.cells if plan.control}
    leaned_on = {name for plan in sweep.cells for name in (plan.reference, plan.baseline)}
    # Those that others are compared with come first: a wrong one is no measure.
    for plan in sorted(sweep.cells, key=lambda p: (p.reference is not None, p.baseline is not None)):
        if plan.id in records and records[plan.id].status == "ok":
            known = {name: records[name] for name, verdict in found.items() if verdict.state != "wrong"}
            measures = {name: record for name, record in known.items() if record.losses}
            control = records.get(controls.get(plan.reference or plan.id, ""))
            found[plan.id] = _judge(plan, records[plan.id], measures, control, plan.id in leaned_on)
    return found


def _judge(
    plan: CellPlan, record: CellRecord, measures: Mapping[str, CellRecord], control: CellRecord | None, leaned_on: bool
) -> Verdict:
    """`measures`: the cells that may be compared with. `control`: of the reference, or of this cell if it is one."""
    losses = record.losses
    step = next((i for i, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
    if step is not None:
        return Verdict("wrong", f"its loss is {losses[step - 1]} at step {step}", departure=math.nan)
    against = plan.reference if plan.reference in measures else plan.baseline
    measure = measures.get(against or "")
    if measure is not None and len(losses) != len(measure.losses):
        return Verdict("wrong", f"{len(losses)} losses where its reference has {len(measure.losses)}", against)
    if not losses:
        return Verdict("unchecked", "it has no losses")
    reference = record if plan.reference is None else measures.get(plan.reference)
    tight, doubt = _tight(plan.reference or plan.id, reference, control)
    if plan.reference is None:
        doubt = "" if measure or (leaned_on and not against) else "no reference to check its losses against"
    far, allowed = None, tight
    if measure is not None:
        far = departure(losses, measure.losses)
        close = tight is not None and against == plan.reference and _rounds_alike(record, measure)
        allowed = tight if close else coarse(record, measure)
        if far > allowed:
            said = f"its loss departs by {scientific(far)} from {against}, tolerance {scientific(allowed)}"
            return Verdict("wrong", said, against, far, allowed)
    between, most = record.largest_round_difference, coarse(record, record) if tight is None else tight
    if between > most:
        said = f"its rounds differ by {scientific(between)} in a loss, tolerance {scientific(most)}"
        return Verdict("wrong", said, against if measure else None, far, allowed)
    return Verdict("unchecked" if doubt else "ok", doubt, against if measure else None, far, allowed)


def _rounds_alike(a: CellRecord, b: CellRecord) -> bool:
    """Not where the ranks of one share a product out and round their summands of it to 16 bits."""
    sizes = {setting(record, "parallel", "tp") for record in (a, b)}
    formats = {setting(record, *key) for record in (a, b) for key in (("model", "dtype"), ("training", "precision"))}
    return len(sizes) == 1 or formats == {"float32"}


def _tight(name: str, reference: CellRecord | None, control: CellRecord | None) -> tuple[float | None, str]:
    """The tolerance around the losses of the reference of this name, or why none is known."""
    if reference is None:
        return None, f"its reference {name} has no usable losses"
    usable = control is not None and control.status == "ok" and len(control.losses) == len(reference.losses)
    if control is None or not usable or not all(map(math.isfinite, control.losses)):
        return None, f"no usable noise control of {name}: no tolerance is known"
    noise, most = departure(control.losses, reference.losses), coarse(control, reference) / NOISE_FACTOR
    if noise > most:
        said = f"the noise control of {name} departs by {scientific(noise)}, more than {scientific(most)}"
        return None, f"{said}: no tolerance is drawn from it"
    return tolerance(reference.losses, control.losses), ""
