"""Verdicts: whether a cell computed the right thing.

The losses of a cell are compared with those of another cell, as closely as rounding allows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.base.records.cell import CellPlan, CellRecord, SweepRecord
from shardwise.base.words import scientific

NOISE_FACTOR = 10.0
"""The tolerance over the difference of the noise control.

A noise control is a single sample of what rounding does to a loss. A real mistake moves the loss a
thousand times more.
"""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one cell that ran to its end."""

    state: Literal["ok", "unchecked", "wrong"]
    reason: str = ""  # why the state is not ok
    against: str | None = None  # id of the cell that its losses were compared with
    difference: float | None = None  # largest |loss - loss of that cell|; NaN for a NaN loss
    tolerance: float | None = None  # for that difference; on a baseline, for those of other cells


def spacing(loss: float) -> float:
    """Return the distance from |loss| to the next larger float32: 2^(exponent - 23)."""
    return 2.0 ** (math.frexp(loss)[1] - 24)


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference at any step; NaN if a loss is not finite."""
    if not all(map(math.isfinite, losses)):
        return math.nan
    return max((abs(a - b) for a, b in zip(losses, reference, strict=True)), default=0.0)


def tolerance(reference: Sequence[float], control: Sequence[float]) -> float:
    """Return the difference that rounding may cause around the losses of `reference`.

    This is NOISE_FACTOR times the difference of the noise control, or times the spacing of float32
    at the largest loss where that is larger.
    """
    return NOISE_FACTOR * max(difference(control, reference), spacing(max(map(abs, reference))))


def coarse_tolerance(a: CellRecord, b: CellRecord) -> float:
    """Return the tolerance between cells that round differently, or whose noise is not known.

    It is a share of the largest loss of `b`: 2^-7 where a cell stores or computes in bfloat16,
    which has 8 significant bits, and 2^-10 where it does in float16, which has 11 and loses some in
    scaled sums. Otherwise it is 1e-3.
    """
    formats = _formats(a, b)
    largest = max(map(abs, b.losses))
    if "bfloat16" in formats:
        return 2**-7 * largest
    if "float16" in formats:
        return 2**-10 * largest
    return 1e-3


def _formats(a: CellRecord, b: CellRecord) -> set[Any]:
    """Return the formats in which two cells store weights or compute products."""
    keys = (("model", "dtype"), ("training", "precision"))
    return {setting(record, *key) for record in (a, b) for key in keys}


def setting(record: CellRecord | None, section: str, key: str) -> Any:
    """Return a value of a record's config, or None where it has none, as after a refusal."""
    content = record.config.get(section) if record else None
    return content.get(key) if isinstance(content, dict) else None


def verdicts(sweep: SweepRecord, records: Mapping[str, CellRecord]) -> dict[str, Verdict]:
    """Return the verdict on each cell that ran to its end, noise controls included, by cell id."""
    results: dict[str, Verdict] = {}
    controls = {plan.reference: plan.id for plan in sweep.cells if plan.control}
    used = {name for plan in sweep.cells for name in (plan.reference, plan.baseline)}
    # Baselines and references come first: nothing is compared with a cell that is wrong.
    order = sorted(
        sweep.cells, key=lambda plan: (plan.reference is not None, plan.baseline is not None)
    )
    for plan in order:
        record = records.get(plan.id)
        if record is None or record.status != "ok":
            continue
        usable = {
            name: records[name]
            for name, verdict in results.items()
            if verdict.state != "wrong" and records[name].losses
        }
        control = records.get(controls.get(plan.reference or plan.id, ""))
        results[plan.id] = _judge(plan, record, usable, control, plan.id in used)
    return results


def _judge(
    plan: CellPlan,
    record: CellRecord,
    usable: Mapping[str, CellRecord],
    control: CellRecord | None,
    is_used: bool,
) -> Verdict:
    """Return the verdict on one cell.

    `usable` are the cells that others may be compared with. `control` is the noise control of the
    cell's reference, or of the cell itself if it is a reference. `is_used` says whether other cells
    are compared with this one.
    """
    losses = record.losses
    step = next((i for i, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
    if step is not None:
        reason = f"its loss is {losses[step - 1]} at step {step}"
        return Verdict("wrong", reason, difference=math.nan)
    against = plan.reference if plan.reference in usable else plan.baseline
    other = usable.get(against or "")
    if other is not None and len(losses) != len(other.losses):
        reason = f"it has {len(losses)} losses and {against} has {len(other.losses)}"
        return Verdict("wrong", reason, against)
    if not losses:
        return Verdict("unchecked", "it has no losses")

    reference = record if plan.reference is None else usable.get(plan.reference)
    tight, doubt = _tight_tolerance(plan.reference or plan.id, reference, control)
    if plan.reference is None:
        is_baseline = is_used and not against
        doubt = "" if other or is_baseline else "there is no reference to compare its losses with"
    largest, allowed = None, tight
    if other is not None:
        largest = difference(losses, other.losses)
        is_tight = tight is not None and against == plan.reference and _round_alike(record, other)
        allowed = tight if is_tight else coarse_tolerance(record, other)
        assert allowed is not None
        if largest > allowed:
            reason = f"its loss differs from {against} by {_over(largest, allowed)}"
            return Verdict("wrong", reason, against, largest, allowed)

    compared_with = against if other else None
    between_rounds = record.largest_round_difference
    allowed_between = coarse_tolerance(record, record) if tight is None else tight
    if between_rounds > allowed_between:
        reason = f"its rounds differ in a loss by {_over(between_rounds, allowed_between)}"
        return Verdict("wrong", reason, compared_with, largest, allowed)
    return Verdict("unchecked" if doubt else "ok", doubt, compared_with, largest, allowed)


def _over(largest: float, allowed: float) -> str:
    """Return a difference that is larger than allowed, as text."""
    return f"{scientific(largest)}, more than {scientific(allowed)}"


def _round_alike(a: CellRecord, b: CellRecord) -> bool:
    """Return whether two cells round alike.

    They do not where the ranks of one share a product and round their partial sums of it to 16
    bits.
    """
    tensor_sizes = {setting(record, "parallel", "tp") for record in (a, b)}
    return len(tensor_sizes) == 1 or _formats(a, b) == {"float32"}


def _tight_tolerance(
    name: str, reference: CellRecord | None, control: CellRecord | None
) -> tuple[float | None, str]:
    """Return the tolerance that the noise control of `name` gives, or None and the reason."""
    if reference is None:
        return None, f"its reference {name} has no usable losses"
    if control is None or not _is_usable(control, reference):
        return None, f"{name} has no usable noise control, so no tolerance is known"
    noise = difference(control.losses, reference.losses)
    most = coarse_tolerance(control, reference) / NOISE_FACTOR
    if noise > most:
        reason = f"the noise control of {name} differs by {_over(noise, most)}"
        return None, f"{reason}, so it gives no tolerance"
    return tolerance(reference.losses, control.losses), ""


def _is_usable(control: CellRecord, reference: CellRecord) -> bool:
    """Return whether a noise control ran to its end with as many finite losses as its reference."""
    is_complete = control.status == "ok" and len(control.losses) == len(reference.losses)
    return is_complete and all(map(math.isfinite, control.losses))
