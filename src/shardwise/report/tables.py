"""Arithmetic on a bench's records: which cells are right, how fast and how lean they are against one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from shardwise.records.cell import Axis, CellPlan, CellRecord, SweepRecord
from shardwise.records.record import Status
from shardwise.report.folder import Bench
from shardwise.report.verdict import Verdict, setting, verdicts
from shardwise.report.words import label_of

State = Status | Literal["unchecked", "wrong", "unreadable", "not run"]
STATES: tuple[State, ...] = (
    *("ok", "unchecked", "wrong", "oom", "unsupported", "timeout", "failed", "stopped", "unreadable", "not run"),
)
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class Row:
    """One cell as it is shown. What was not measured, or must not be told of a wrong cell, is None."""

    plan: CellPlan
    label: str  # what it is called among the cells of its group
    state: State
    reason: str = ""
    record: CellRecord | None = None
    verdict: Verdict | None = None  # of a cell that ran to its end
    is_baseline: bool = False  # speeds are set against it
    is_reference: bool = False  # losses are: a baseline's, or of other numerics
    tokens_per_second: float | None = None
    tokens_range: tuple[float, float] | None = None  # over the good rounds, where there are several
    peak_memory_bytes: int | None = None  # of the rank with the most
    speedup: float | None = None  # over the baseline
    speedup_over: str | None = None  # name of the baseline
    over_slowest: float | None = None  # over the slowest cell of the group
    efficiency: float | None = None  # T_N / (N T_1), T in global tokens/s
    efficiency_over: str | None = None  # name of the cell that T_1 is of
    saving: float | None = None  # share of ddp's peak memory that is not needed
    saving_over: str | None = None

    @property
    def measured(self) -> bool:
        """Whether its figures may be told; a control ran for its losses alone."""
        return self.state in ("ok", "unchecked") and not self.plan.control

    @property
    def name(self) -> str:
        """Its label, as it stands beside its figures."""
        return f"{self.label} (unchecked)" if self.state == "unchecked" else self.label

    @property
    def good_rounds(self) -> int:
        """How many of its rounds its figures are of."""
        return sum(a_round["status"] == "ok" for a_round in self.record.rounds) if self.record else 0


def make_rows(bench: Bench) -> list[Row]:
    """A row for each cell of the sweep, controls too, in the sweep's order: never a gap."""
    sweep = bench.sweep
    found = verdicts(sweep, bench.records)
    baselines = {_baseline_of(plan) for plan in sweep.cells if not plan.control}
    references = baselines | {plan.reference for plan in sweep.cells}
    rows = []
    for plan in sweep.cells:
        label, record, verdict = label_of(plan, sweep), bench.records.get(plan.id), found.get(plan.id)
        if record is None:
            rows.append(_without_record(plan, label, bench))
            continue
        state, reason = (verdict.state, verdict.reason) if verdict else (record.status, record.reason)
        row = Row(plan, label, state, reason, record, verdict, plan.id in baselines, plan.id in references)
        rows.append(_with_figures(row) if row.measured else row)
    return [_derive(row, rows) if row.measured else row for row in rows]


def _baseline_of(plan: CellPlan) -> str | None:
    """The id of the cell that this one's speed is set against; None for a baseline."""
    return plan.baseline or plan.reference


def _without_record(plan: CellPlan, label: str, bench: Bench) -> Row:
    if plan.id in bench.problems:
        return Row(plan, label, "unreadable", bench.problems[plan.id])
    begun, rounds = bench.begun.get(plan.id, 0), bench.sweep.rounds
    if begun:
        return Row(plan, label, "not run", f"{begun} of {rounds} rounds begun, none recorded")
    return Row(plan, label, "not run", "shardwise bench has not come to it")


def _with_figures(row: Row) -> Row:
    record = row.record
    assert record is not None
    low_high = record.spread.get("tokens_per_second") if row.good_rounds > 1 else None
    return replace(
        row,
        tokens_per_second=record.tokens_per_second,
        tokens_range=(low_high[0], low_high[1]) if low_high else None,
        peak_memory_bytes=max(record.peak_memory_bytes) if record.peak_memory_bytes else None,
    )


def _derive(row: Row, rows: Sequence[Row]) -> Row:
    """What follows from a cell's figures and those of the cells of its group."""
    group = [r for r in rows if r.plan.group == row.plan.group and r.measured]
    processes, found = row.plan.nproc, {}
    baseline = row if row.is_baseline else next((r for r in group if r.plan.id == _baseline_of(row.plan)), None)
    if speed := row.tokens_per_second:
        if baseline and baseline.tokens_per_second:
            found |= {"speedup": speed / baseline.tokens_per_second, "speedup_over": baseline.name}
        found["over_slowest"] = speed / min(r.tokens_per_second for r in group if r.tokens_per_second)
        alone = _nearest(row, group, lambda r: r.plan.nproc == 1 and bool(r.tokens_per_second))
        if alone and alone.tokens_per_second and processes > 1:
            found |= {"efficiency": speed / alone.tokens_per_second / processes, "efficiency_over": alone.name}
    ddp = _nearest(row, group, lambda r: r.plan.nproc == processes and _is_ddp(r))
    if ddp and ddp.peak_memory_bytes and row.peak_memory_bytes and not _is_ddp(row):
        found |= {"saving": 1 - row.peak_memory_bytes / ddp.peak_memory_bytes, "saving_over": ddp.name}
    return replace(row, **found)


def differing_keys(a: CellRecord, b: CellRecord) -> list[str]:
    """The keys of the run file that two cells do not have in common, where their output lies aside."""
    of_a, of_b = flat(a), flat(b)
    return [key for key in dict.fromkeys([*of_a, *of_b]) if of_a.get(key, ...) != of_b.get(key, ...)]


def flat(record: CellRecord) -> dict[str, Any]:
    """A record's config as `section.key` -> value, without where its output lies."""
    found: dict[str, Any] = {}
    for section, keys in record.config.items():
        found |= {f"{section}.{key}": v for key, v in keys.items()} if isinstance(keys, dict) else {section: keys}
    found.pop("training.output_dir", None)
    return found


def _nearest(row: Row, group: Sequence[Row], wanted: Callable[[Row], bool]) -> Row | None:
    """The wanted cell that differs from this one in layout alone, and in as few keys as there is."""
    found = [
        (len(keys), place, other)
        for place, other in enumerate(group)
        if wanted(other) and row.record and other.record
        for keys in [differing_keys(row.record, other.record)]
        if all(key.startswith("parallel.") or key == "training.global_batch_size" for key in keys)
    ]
    return min(found)[2] if found else None


def _is_ddp(row: Row) -> bool:
    """Of the whole model on each rank: neither cut into stages nor within layers."""
    whole = all(setting(row.record, "parallel", axis) in (1, None) for axis in ("pp", "tp"))
    return whole and setting(row.record, "parallel", "data") == "ddp"


def scaling_kind(sweep: SweepRecord) -> str:
    """`weak`: equal tokens per process; `strong`: equal tokens in all."""
    weak = any({"nproc", "training.global_batch_size"} <= set(axis.keys) and axis.compared for axis in sweep.axes)
    return "weak" if weak else "strong"


def candidates(rows: Sequence[Row]) -> list[Row]:
    """The cells of a group that may be called its best: unchecked ones only where none is known to be right."""
    known = [row for row in rows if row.measured]
    return [row for row in known if row.state == "ok"] or known


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The candidates that no other beats in speed or memory without losing in the other; leanest first."""
    points = [
        (row.tokens_per_second, row.peak_memory_bytes, row)
        for row in candidates(rows)
        if row.tokens_per_second and row.peak_memory_bytes
    ]
    front = [
        (peak, row)
        for speed, peak, row in points
        if not any(s >= speed and p <= peak and (s > speed or p < peak) for s, p, _ in points)
    ]
    return [row for _, row in sorted(front, key=lambda point: point[0])]


def memory_parts(row: Row) -> dict[str, int] | None:
    """What the peak of the rank with the largest one is made of, in the first good round."""
    record = row.record
    if record is None or not row.measured or not record.memory_parts:
        return None
    parts = max(record.memory_parts, key=lambda of_rank: sum(of_rank.get(part, 0) for part in MEMORY_PARTS))
    return {part: parts.get(part, 0) for part in MEMORY_PARTS}


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
    """Each fact of where and with what the cells ran, with the values it had; one value where it was always that."""
    found: dict[str, list[Any]] = {}
    for record in (row.record for row in rows if row.record):
        kernels = {f"{name} kernel": kernel for name, kernel in record.kernels.items()}
        for key, value in (record.environment | kernels).items():
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return found


def counts(rows: Sequence[Row]) -> dict[State, int]:
    """How many cells, controls aside, are in each state that occurs."""
    states = [row.state for row in rows if not row.plan.control]
    return {state: states.count(state) for state in STATES if state in states}


def interleaved(rows: Sequence[Row]) -> bool:
    """Whether the times show that in each group no cell ran a round before every other had run the one before it."""
    for cells in groups_of([row for row in rows if row.record and not row.plan.control]).values():
        starts = [[a_round.get("started") or "" for a_round in row.record.rounds] for row in cells if row.record]
        by_round = [[times[k] for times in starts if k < len(times)] for k in range(max(map(len, starts)))]
        if not all(time for times in by_round for time in times):
            return False
        if any(max(one) > min(following) for one, following in pairwise(by_round)):
            return False
    return True


def rounds_of(rows: Sequence[Row]) -> str:
    """How many good rounds the cells with figures have: `3 rounds`, `2 to 3 rounds`; empty where none has."""
    numbers = [row.good_rounds for row in rows if row.measured and row.plan.timed]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return f"{low} round{'' if high == 1 else 's'}" if low == high else f"{low} to {high} rounds"
