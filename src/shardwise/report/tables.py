"""The rows of a report: which cells are right, and how their speed and memory compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from shardwise.config import flat
from shardwise.records.cell import Axis, CellPlan, CellRecord, SweepRecord
from shardwise.records.record import Status
from shardwise.report.folder import Bench
from shardwise.report.names import label_of
from shardwise.report.verdict import Verdict, setting, verdicts
from shardwise.words import counted

State = Status | Literal["unchecked", "wrong", "unreadable", "not run"]
STATES: tuple[State, ...] = (
    "ok",
    "unchecked",
    "wrong",
    "oom",
    "unsupported",
    "timeout",
    "failed",
    "stopped",
    "unreadable",
    "not run",
)
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")
LAYOUT_PREFIX, GLOBAL_BATCH = "parallel.", "training.global_batch_size"


@dataclass(frozen=True)
class Row:
    """One cell in a report.

    A figure is None where it was not measured, and on a cell that is wrong.
    """

    plan: CellPlan
    label: str  # name among the cells of its group
    state: State
    reason: str = ""  # why the state is not ok
    record: CellRecord | None = None
    verdict: Verdict | None = None  # of a cell that ran to its end
    is_baseline: bool = False  # the speeds of others are compared with it
    is_reference: bool = False  # the losses of others are compared with it
    tokens_per_second: float | None = None
    tokens_range: tuple[float, float] | None = None  # over the good rounds, if there are several
    peak_memory_bytes: int | None = None  # of the rank with the most
    speedup: float | None = None  # over the baseline
    speedup_over: str | None = None  # name of the baseline
    over_slowest: float | None = None  # speed-up over the slowest cell of the group
    efficiency: float | None = None  # T_N / (N T_1), where T is global tokens/s
    efficiency_over: str | None = None  # name of the cell of T_1
    saving: float | None = None  # 1 - peak memory / peak memory of ddp
    saving_over: str | None = None  # name of the cell of ddp

    @property
    def measured(self) -> bool:
        """Return whether its figures are shown.

        Those of a noise control are not: it runs for its losses.
        """
        return self.state in ("ok", "unchecked") and not self.plan.control

    @property
    def name(self) -> str:
        """Return its label as it stands beside its figures."""
        return f"{self.label} (unchecked)" if self.state == "unchecked" else self.label

    @property
    def num_good_rounds(self) -> int:
        """Return the number of rounds behind its figures."""
        rounds = self.record.rounds if self.record else []
        return sum(entry["status"] == "ok" for entry in rounds)


def make_rows(bench: Bench) -> list[Row]:
    """Return a row for every cell of the sweep, including noise controls and cells not run."""
    sweep = bench.sweep
    verdict_of = verdicts(sweep, bench.records)
    baselines = {_baseline_of(plan) for plan in sweep.cells if not plan.control}
    references = baselines | {plan.reference for plan in sweep.cells}
    rows = []
    for plan in sweep.cells:
        label = label_of(plan, sweep)
        record, verdict = bench.records.get(plan.id), verdict_of.get(plan.id)
        if record is None:
            rows.append(_without_record(plan, label, bench))
            continue
        row = Row(
            plan=plan,
            label=label,
            state=verdict.state if verdict else record.status,
            reason=verdict.reason if verdict else record.reason,
            record=record,
            verdict=verdict,
            is_baseline=plan.id in baselines,
            is_reference=plan.id in references,
        )
        rows.append(_with_figures(row, record) if row.measured else row)
    return [_with_ratios(row, rows) if row.measured else row for row in rows]


def _baseline_of(plan: CellPlan) -> str | None:
    """Return the id of the cell that this cell's speed is compared with; None for a baseline."""
    return plan.baseline or plan.reference


def _without_record(plan: CellPlan, label: str, bench: Bench) -> Row:
    """Return the row of a cell that has no readable record."""
    if plan.id in bench.problems:
        return Row(plan, label, "unreadable", bench.problems[plan.id])
    num_begun = bench.begun.get(plan.id, 0)
    if num_begun:
        reason = f"{num_begun} of {counted(bench.sweep.rounds, 'round')} begun, none recorded"
        return Row(plan, label, "not run", reason)
    return Row(plan, label, "not run", "shardwise bench has not reached it")


def _with_figures(row: Row, record: CellRecord) -> Row:
    """Return a row with the figures of its record."""
    low_high = record.spread.get("tokens_per_second") if row.num_good_rounds > 1 else None
    return replace(
        row,
        tokens_per_second=record.tokens_per_second,
        tokens_range=(low_high[0], low_high[1]) if low_high else None,
        peak_memory_bytes=max(record.peak_memory_bytes) if record.peak_memory_bytes else None,
    )


def _with_ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Return a row with its ratios to other cells of its group."""
    group = [other for other in rows if other.plan.group == row.plan.group and other.measured]
    ratios: dict[str, Any] = {}
    speed = row.tokens_per_second
    if speed:
        ratios |= _speed_ratios(row, speed, group)
    ddp = _nearest(row, group, lambda other: other.plan.nproc == row.plan.nproc and _is_ddp(other))
    if ddp and ddp.peak_memory_bytes and row.peak_memory_bytes and not _is_ddp(row):
        ratios["saving"] = 1 - row.peak_memory_bytes / ddp.peak_memory_bytes
        ratios["saving_over"] = ddp.name
    return replace(row, **ratios)


def _speed_ratios(row: Row, speed: float, group: Sequence[Row]) -> dict[str, Any]:
    """Return the speed-ups and the efficiency of a cell of this speed in tokens/s."""
    ratios: dict[str, Any] = {}
    baseline_id = row.plan.id if row.is_baseline else _baseline_of(row.plan)
    baseline = next((other for other in group if other.plan.id == baseline_id), None)
    if baseline and baseline.tokens_per_second:
        ratios["speedup"] = speed / baseline.tokens_per_second
        ratios["speedup_over"] = baseline.name
    slowest = min(other.tokens_per_second for other in group if other.tokens_per_second)
    ratios["over_slowest"] = speed / slowest
    alone = _nearest(
        row, group, lambda other: other.plan.nproc == 1 and bool(other.tokens_per_second)
    )
    if alone and alone.tokens_per_second and row.plan.nproc > 1:
        ratios["efficiency"] = speed / alone.tokens_per_second / row.plan.nproc
        ratios["efficiency_over"] = alone.name
    return ratios


def run_settings(record: CellRecord) -> dict[str, Any]:
    """Return a record's config as `section.key` -> value, without the output folder."""
    settings = flat(record.config)
    settings.pop("training.output_dir", None)
    return settings


def differing_keys(a: CellRecord, b: CellRecord) -> list[str]:
    """Return the keys of the run file in which two cells differ, except their output folder."""
    of_a, of_b = run_settings(a), run_settings(b)
    keys = dict.fromkeys([*of_a, *of_b])
    return [key for key in keys if of_a.get(key, ...) != of_b.get(key, ...)]


def _nearest(row: Row, group: Sequence[Row], accept: Callable[[Row], bool]) -> Row | None:
    """Return the accepted cell that differs in layout alone, and in the fewest keys."""
    choices = []
    for place, other in enumerate(group):
        if not (accept(other) and row.record and other.record):
            continue
        keys = differing_keys(row.record, other.record)
        if all(key.startswith(LAYOUT_PREFIX) or key == GLOBAL_BATCH for key in keys):
            choices.append((len(keys), place, other))
    return min(choices)[2] if choices else None


def _is_ddp(row: Row) -> bool:
    """Return whether each rank of a cell has the whole model, cut neither by pp nor by tp."""
    is_replicated = all(setting(row.record, "parallel", axis) in (1, None) for axis in ("pp", "tp"))
    return is_replicated and setting(row.record, "parallel", "data") == "ddp"


def scaling_kind(sweep: SweepRecord) -> str:
    """Return `weak` if each process has equally many tokens, `strong` if all together have."""
    keys = {"nproc", GLOBAL_BATCH}
    is_weak = any(axis.compared and keys <= set(axis.keys) for axis in sweep.axes)
    return "weak" if is_weak else "strong"


def candidates(rows: Sequence[Row]) -> list[Row]:
    """Return the cells that may be the best of a group.

    Unchecked cells may be only where no cell is ok.
    """
    measured = [row for row in rows if row.measured]
    return [row for row in measured if row.state == "ok"] or measured


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the Pareto front of speed and memory among the candidates, least memory first.

    A cell is on the front where no other is at least as good in both and better in one.
    """
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
    """Return the bytes of each part of the peak, on the rank with the largest one."""
    record = row.record
    if record is None or not row.measured or not record.memory_parts:
        return None
    largest = max(
        record.memory_parts, key=lambda parts: sum(parts.get(part, 0) for part in MEMORY_PARTS)
    )
    return {part: largest.get(part, 0) for part in MEMORY_PARTS}


def number_of(axis: Axis, row: Row) -> float | None:
    """Return the place of a cell on an axis of numbers, or None where its value is no number.

    On an axis that sets the number of processes, this is that number. Otherwise it is the name of
    the value.
    """
    if set(axis.keys) in ({"nproc"}, {"nproc", GLOBAL_BATCH}):
        return float(row.plan.nproc)
    try:
        number = float(row.plan.values[axis.name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None


def numeric_axes(sweep: SweepRecord, rows: Sequence[Row]) -> list[Axis]:
    """Return the axes along which a line can be drawn: all cells have a positive number there."""
    cells = [row for row in rows if not row.plan.control]
    return [
        axis
        for axis in sweep.axes
        if len(axis.values) > 1 and cells and all((number_of(axis, row) or 0) > 0 for row in cells)
    ]


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each group, in their order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.plan.group, []).append(row)
    return groups


def equal_in_all(sweep: SweepRecord) -> dict[str, Any]:
    """Return what all groups have in common."""
    first, *others = [*sweep.equal.values()] or [{}]
    common = dict(first)
    for other in others:
        common = {key: value for key, value in common.items() if other.get(key, ...) == value}
    return common


def environments(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the values of each fact of the cells' environments, without repetition."""
    facts: dict[str, list[Any]] = {}
    for record in (row.record for row in rows if row.record):
        kernels = {f"{name} kernel": kernel for name, kernel in record.kernels.items()}
        for key, value in (record.environment | kernels).items():
            values = facts.setdefault(key, [])
            if value not in values:
                values.append(value)
    return facts


def counts(rows: Sequence[Row]) -> dict[State, int]:
    """Return the number of cells in each state that occurs, without noise controls."""
    states = [row.state for row in rows if not row.plan.control]
    return {state: states.count(state) for state in STATES if state in states}


def interleaved(rows: Sequence[Row]) -> bool:
    """Return whether the rounds of each group were interleaved, by the times at which they started.

    They were if every cell had begun round k before any cell began round k + 1. Without times the
    answer is no.
    """
    cells = [row for row in rows if row.record and not row.plan.control]
    for of_group in groups_of(cells).values():
        records = [row.record for row in of_group if row.record]
        starts = [[entry.get("started") or "" for entry in record.rounds] for record in records]
        num_rounds = max(map(len, starts))
        by_round = [[times[k] for times in starts if k < len(times)] for k in range(num_rounds)]
        if not all(time for times in by_round for time in times):
            return False
        if any(max(earlier) > min(later) for earlier, later in pairwise(by_round)):
            return False
    return True


def rounds_of(rows: Sequence[Row]) -> str:
    """Return how many good rounds the timed cells have: `3 rounds`, `2 to 3 rounds`, or nothing."""
    numbers = [row.num_good_rounds for row in rows if row.measured and row.plan.timed]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return counted(high, "round") if low == high else f"{low} to {high} rounds"
