"""Arithmetic on a bench's records: which cells are right, how fast and how lean they are against one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.metrics.cell import Axis, CellPlan, CellRecord, SweepRecord
from shardwise.metrics.record import Status
from shardwise.report.folder import Bench
from shardwise.report.words import label_of, scientific

State = Status | Literal["unchecked", "wrong", "unreadable", "not run"]
STATES: tuple[State, ...] = (
    *("ok", "unchecked", "wrong", "oom", "unsupported", "timeout", "failed", "stopped", "unreadable", "not run"),
)
NOISE_FACTOR = 10.0
"""A control is one draw of what rounding does to a loss; a real mistake moves it a thousand times further."""
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class Row:
    """One cell as it is shown. What was not measured, or must not be told of a wrong cell, is None."""

    plan: CellPlan
    label: str  # what it is called among the cells of its group
    state: State
    reason: str = ""
    record: CellRecord | None = None
    is_reference: bool = False
    departure: float | None = None  # largest |loss - reference's| over the steps; NaN where a loss is
    tolerance: float | None = None
    tokens_per_second: float | None = None
    tokens_range: tuple[float, float] | None = None  # over the good rounds, where there are several
    peak_memory_bytes: int | None = None  # of the rank with the most
    speedup: float | None = None  # over the reference
    over_slowest: float | None = None  # over the slowest cell of the group
    efficiency: float | None = None  # T_N / (N T_1), T in global tokens/s
    efficiency_over: str | None = None  # label of the cell that T_1 is of
    saving: float | None = None  # share of ddp's peak memory that is not needed
    saving_over: str | None = None

    @property
    def measured(self) -> bool:
        """Whether its figures may be told."""
        return self.state in ("ok", "unchecked")

    @property
    def name(self) -> str:
        """Its label, as it stands beside its figures."""
        return f"{self.label} (unchecked)" if self.state == "unchecked" else self.label


def make_rows(bench: Bench) -> list[Row]:
    """A row for each cell of the sweep, controls too, in the sweep's order: never a gap."""
    sweep, records = bench.sweep, bench.records
    controls = {plan.reference: records.get(plan.id) for plan in sweep.cells if plan.control}
    references = {plan.reference for plan in sweep.cells}
    rows = []
    for plan in sweep.cells:
        label = label_of(plan, sweep)
        record = records.get(plan.id)
        if record is None:
            rows.append(_without_record(plan, label, bench))
            continue
        row = Row(plan, label, record.status, record.reason, record, is_reference=plan.id in references)
        if record.status == "ok":
            reference = records.get(plan.reference) if plan.reference is not None else None
            row = _judge(row, reference, controls.get(plan.reference or plan.id))
        rows.append(_with_figures(row) if row.measured else row)
    return [_derive(row, rows, sweep) if row.measured and not row.plan.control else row for row in rows]


def _without_record(plan: CellPlan, label: str, bench: Bench) -> Row:
    if plan.id in bench.problems:
        return Row(plan, label, "unreadable", bench.problems[plan.id])
    begun, rounds = bench.begun.get(plan.id, 0), bench.sweep.rounds
    if begun:
        return Row(plan, label, "not run", f"{begun} of {rounds} rounds begun, none recorded")
    return Row(plan, label, "not run", "shardwise bench has not come to it")


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


def _judge(row: Row, reference: CellRecord | None, control: CellRecord | None) -> Row:
    """The row of a cell that ran to its end, with the verdict on its losses."""
    assert row.record is not None
    losses = row.record.losses
    step = next((i for i, loss in enumerate(losses, start=1) if not math.isfinite(loss)), None)
    if step is not None:
        return replace(row, state="wrong", reason=f"its loss is {losses[step - 1]} at step {step}", departure=math.nan)
    if row.is_reference:
        usable = _usable(control, losses)
        return replace(row, tolerance=tolerance(losses, control.losses) if control and usable else None)
    if row.plan.reference is None:
        return replace(row, state="unchecked", reason="no reference to check its losses against")
    if reference is None or not _usable(reference, reference.losses):
        return replace(row, state="unchecked", reason=f"its reference {row.plan.reference} has no usable losses")
    if len(losses) != len(reference.losses):
        reason = f"{len(losses)} losses where its reference has {len(reference.losses)}"
        return replace(row, state="wrong", reason=reason)
    if control is None or not _usable(control, reference.losses):
        reason = f"no usable noise control of {row.plan.reference}: no tolerance is known"
        return replace(row, state="unchecked", reason=reason, departure=departure(losses, reference.losses))
    far, allowed = departure(losses, reference.losses), tolerance(reference.losses, control.losses)
    row = replace(row, departure=far, tolerance=allowed)
    if far <= allowed:
        return row
    reason = f"its loss departs by {scientific(far)} from {row.plan.reference}, tolerance {scientific(allowed)}"
    return replace(row, state="wrong", reason=reason)


def _usable(record: CellRecord | None, like: Sequence[float]) -> bool:
    """Whether a run's losses can serve as a measure."""
    return (
        record is not None
        and record.status == "ok"
        and 0 < len(record.losses) == len(like)
        and all(map(math.isfinite, record.losses))
    )


def _with_figures(row: Row) -> Row:
    record = row.record
    assert record is not None
    several = sum(a_round.get("status") == "ok" for a_round in record.rounds) > 1
    low_high = record.spread.get("tokens_per_second") if several else None
    return replace(
        row,
        tokens_per_second=record.tokens_per_second,
        tokens_range=(low_high[0], low_high[1]) if low_high else None,
        peak_memory_bytes=max(record.peak_memory_bytes) if record.peak_memory_bytes else None,
    )


def _derive(row: Row, rows: Sequence[Row], sweep: SweepRecord) -> Row:
    """What follows from a cell's figures and those of the cells of its group."""
    group = [r for r in rows if r.plan.group == row.plan.group and r.measured and not r.plan.control]
    speed, peak, processes = row.tokens_per_second, row.peak_memory_bytes, row.plan.nproc
    reference = row if row.is_reference else next((r for r in group if r.plan.id == row.plan.reference), None)
    row = replace(
        row,
        speedup=_ratio(speed, reference.tokens_per_second) if reference else None,
        over_slowest=_ratio(speed, min((r.tokens_per_second for r in group if r.tokens_per_second), default=None)),
    )
    layout = {axis.name for axis in sweep.axes if _is_layout(axis)}
    alone = _nearest(row, group, layout, lambda r: r.plan.nproc == 1 and bool(r.tokens_per_second))
    if alone is not None and processes > 1:
        per_process = _ratio(speed, alone.tokens_per_second)
        if per_process is not None:
            row = replace(row, efficiency=per_process / processes, efficiency_over=alone.label)
    ddp = _nearest(row, group, layout, lambda r: r.plan.nproc == processes and _strategy(r) == "ddp")
    if ddp is not None and ddp.plan != row.plan:
        share = _ratio(peak, ddp.peak_memory_bytes)
        if share is not None:
            row = replace(row, saving=1 - share, saving_over=ddp.label)
    return row


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _is_layout(axis: Axis) -> bool:
    return all(key in ("nproc", "training.global_batch_size") or key.startswith("parallel.") for key in axis.keys)


def _nearest(row: Row, group: Sequence[Row], layout: set[str], wanted: Callable[[Row], bool]) -> Row | None:
    """The wanted cell that differs from this one in layout axes alone, and in as few of them as there is."""
    mine = row.plan.values

    def differs(other: Row) -> set[str]:
        return {name for name, value in other.plan.values.items() if mine.get(name) != value}

    found = [other for other in group if wanted(other) and differs(other) <= layout]
    return min(found, key=lambda other: len(differs(other)), default=None)


def _strategy(row: Row) -> str | None:
    return row.record.config.get("parallel", {}).get("data") if row.record else None


def scaling_kind(sweep: SweepRecord) -> str:
    """`weak`: equal tokens per process; `strong`: equal tokens in all."""
    weak = any({"nproc", "training.global_batch_size"} <= set(axis.keys) and axis.compared for axis in sweep.axes)
    return "weak" if weak else "strong"


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The cells that no other beats in speed or memory without losing in the other; leanest first."""
    points = [
        (row.tokens_per_second, row.peak_memory_bytes, row)
        for row in rows
        if row.tokens_per_second and row.peak_memory_bytes and not row.plan.control
    ]
    front = [
        (peak, row)
        for speed, peak, row in points
        if not any(s >= speed and p <= peak and (s > speed or p < peak) for s, p, _ in points)
    ]
    return [row for _, row in sorted(front, key=lambda point: point[0])]


def memory_parts(row: Row) -> dict[str, int] | None:
    """What the peak of the rank with the largest one is made of."""
    record = row.record
    if record is None or not row.measured or not record.memory_parts or not record.peak_memory_bytes:
        return None
    rank = max(range(len(record.peak_memory_bytes)), key=record.peak_memory_bytes.__getitem__)
    return {part: record.memory_parts[rank].get(part, 0) for part in MEMORY_PARTS}


def number_of(axis: Axis, row: Row) -> float | None:
    """Where a cell lies on an axis of numbers: its value's name, or its processes where the axis sets those."""
    if set(axis.keys) in ({"nproc"}, {"nproc", "training.global_batch_size"}):
        return float(row.plan.nproc)
    try:
        number = float(row.plan.values[axis.name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None


def numeric_axes(sweep: SweepRecord, rows: Sequence[Row]) -> list[Axis]:
    """The axes along which a line can be drawn."""
    cells = [row for row in rows if not row.plan.control]
    return [
        axis
        for axis in sweep.axes
        if len(axis.values) > 1 and cells and all((number_of(axis, row) or 0) > 0 for row in cells)
    ]


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by group, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.plan.group, []).append(row)
    return groups


def equal_in_all(sweep: SweepRecord) -> dict[str, Any]:
    """What every group has in common."""
    first, *others = [*sweep.equal.values()] or [{}]
    return {key: value for key, value in first.items() if all(o.get(key, ...) == value for o in others)}


def environments(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Each fact of where the cells ran, with the values it had; one value where all ran in the same place."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in (row.record.environment if row.record else {}).items():
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return found


def counts(rows: Sequence[Row]) -> dict[State, int]:
    """How many cells, controls aside, are in each state that occurs."""
    states = [row.state for row in rows if not row.plan.control]
    return {state: states.count(state) for state in STATES if state in states}


def findings(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """The fastest and the leanest of the measured cells of a group."""
    known = [row for row in rows if row.measured and not row.plan.control]
    fastest = max((r for r in known if r.tokens_per_second), key=lambda r: r.tokens_per_second or 0, default=None)
    leanest = min((r for r in known if r.peak_memory_bytes), key=lambda r: r.peak_memory_bytes or 0, default=None)
    return fastest, leanest
