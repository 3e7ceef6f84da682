"""The rows of a report: which cells are right, and how their speed and memory compare."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.base.layouts import strategies
from shardwise.base.records.cell import Axis, CellPlan, CellRecord, SweepRecord
from shardwise.base.records.record import RoutingRecord, Status
from shardwise.base.words import counted
from shardwise.config.keys import flat
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.names import label_of
from shardwise.lab.report.verdict import Verdict, setting, verdicts

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
    verdict: Verdict | None = None  # verdict on a cell that ran to its end
    is_baseline: bool = False  # the speeds of others are compared with it
    is_reference: bool = False  # the losses of others are compared with it
    speedup: float | None = None  # over the baseline
    over_slowest: float | None = None  # speed-up over the slowest cell of the group
    efficiency: float | None = None  # T_N / (N T_1), where T is global tokens/s
    norm_difference: float | None = None  # largest |norm / norm of that cell - 1| at any step
    saving: float | None = None  # 1 - peak memory / peak memory of ddp
    relative_to: Mapping[str, str] = field(default_factory=dict)
    """The name of the other cell in a ratio, by the name of the ratio's field."""

    @property
    def measured(self) -> bool:
        """Return whether its figures are shown.

        Those of a noise control are not: it runs for its losses.
        """
        return self.state in ("ok", "unchecked") and not self.plan.control

    @property
    def figures(self) -> CellRecord | None:
        """Return its record if its figures are shown."""
        return self.record if self.measured else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median over the good rounds."""
        return self.figures.tokens_per_second if self.figures else None

    @property
    def tokens_range(self) -> tuple[float, float] | None:
        """Return the speeds of the slowest and the fastest good round, if there are several."""
        if self.figures is None or self.num_good_rounds < 2:
            return None
        low_high = self.figures.spread.get("tokens_per_second")
        return (low_high[0], low_high[1]) if low_high else None

    @property
    def step_seconds(self) -> dict[str, float]:
        """Return the percentiles of its step times by name; none where it was not timed."""
        return (self.figures.step_seconds if self.figures else None) or {}

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the peak of the rank with the largest one."""
        peaks = self.figures.peak_memory_bytes if self.figures else None
        return max(peaks) if peaks else None

    @property
    def sent_bytes(self) -> int | None:
        """Return what leaves the rank that sends most in a step, as it was counted."""
        sent = self.figures.sent_bytes_per_step if self.figures else None
        return max(sent) if sent else None

    @property
    def predicted_bytes(self) -> int | None:
        """Return what leaves the rank that sends most in a step, by formula."""
        sent = self.figures.sent_bytes_by_formula if self.figures else None
        return max(sent) if sent else None

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Return the step and the validation loss of each evaluation, wrong cells included."""
        evaluations = self.record.eval if self.record else []
        read = [(entry.get("step"), entry.get("loss")) for entry in evaluations]
        return [(int(step), loss) for step, loss in read if step is not None and loss is not None]

    @property
    def memory_parts(self) -> dict[str, int] | None:
        """Return the bytes of MEMORY_PARTS on the rank where their sum is largest."""
        ranks = self.figures.memory_parts if self.figures else None
        parts = [{part: rank.get(part, 0) for part in MEMORY_PARTS} for rank in ranks or []]
        return max(parts, key=lambda rank: sum(rank.values()), default=None)

    @property
    def routing(self) -> RoutingRecord | None:
        """Return how evenly its routers gave tokens to experts, if it has any."""
        routing = self.figures.routing if self.figures else None
        return RoutingRecord(**routing) if routing else None

    @property
    def difference(self) -> float | None:
        """Return the largest difference of its losses from those that they are compared with."""
        return self.verdict.difference if self.verdict else None

    @property
    def tolerance(self) -> float | None:
        """Return the largest difference that is ok."""
        return self.verdict.tolerance if self.verdict else None

    @property
    def name(self) -> str:
        """Return its label, with a mark where the cell is wrong or unchecked."""
        if self.state == "wrong":
            return f"✗ {self.label}"
        return f"{self.label} (unchecked)" if self.state == "unchecked" else self.label

    @property
    def num_good_rounds(self) -> int:
        """Return the number of rounds behind its figures."""
        rounds = self.record.rounds if self.record else []
        return sum(entry["status"] == "ok" for entry in rounds)


def make_rows(bench: BenchFolder) -> list[Row]:
    """Return a row for every cell of the sweep, including noise controls and cells not run."""
    sweep = bench.sweep
    verdict_of = verdicts(sweep, bench.records)
    baselines = {_baseline_of(plan) for plan in sweep.cells if not plan.control}
    references = baselines | {plan.reference for plan in sweep.cells}
    rows = []
    for plan in sweep.cells:
        verdict = verdict_of.get(plan.id)
        state, reason = _state(plan, verdict, bench)
        row = Row(
            plan=plan,
            label=label_of(plan, sweep),
            state=state,
            reason=reason,
            record=bench.records.get(plan.id),
            verdict=verdict,
            is_baseline=plan.id in baselines,
            is_reference=plan.id in references,
            norm_difference=_norm_difference(plan, verdict, bench),
        )
        rows.append(row)
    return [_with_ratios(row, rows) if row.measured else row for row in rows]


def _norm_difference(plan: CellPlan, verdict: Verdict | None, bench: BenchFolder) -> float | None:
    """Return how far the gradient norms of a cell are from those that it is compared with."""
    if verdict is None or verdict.against is None:
        return None
    pairs = zip(bench.records[plan.id].grad_norms, bench.records[verdict.against].grad_norms)
    return max((abs(norm - other) / other for norm, other in pairs if other), default=None)


def _baseline_of(plan: CellPlan) -> str | None:
    """Return the id of the cell that this cell's speed is compared with; None for a baseline."""
    return plan.baseline or plan.reference


def _state(plan: CellPlan, verdict: Verdict | None, bench: BenchFolder) -> tuple[State, str]:
    """Return the state of a cell, and the reason why it is not ok."""
    if verdict:
        return verdict.state, verdict.reason
    if record := bench.records.get(plan.id):
        return record.status, record.reason
    if plan.id in bench.problems:
        return "unreadable", bench.problems[plan.id]
    if num_begun := bench.begun.get(plan.id):
        rounds = counted(bench.sweep.rounds, "round")
        return "not run", f"{num_begun} of {rounds} begun, none recorded"
    return "not run", "shardwise bench has not reached it"


def _with_ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Return a row with its ratios to other cells of its group."""
    group = [other for other in rows if other.plan.group == row.plan.group and other.measured]
    speeds = {other.plan.id: other.tokens_per_second or 0.0 for other in group}
    peaks = {other.plan.id: other.peak_memory_bytes or 0 for other in group}
    speed, peak = speeds[row.plan.id], peaks[row.plan.id]
    baseline_id = row.plan.id if row.is_baseline else _baseline_of(row.plan)
    ratios: dict[str, float] = {}
    names = {}
    if speed:
        ratios["over_slowest"] = speed / min(filter(None, speeds.values()))
        for other in group:
            if other.plan.id == baseline_id and speeds[baseline_id]:
                ratios["speedup"] = speed / speeds[baseline_id]
                if not row.is_baseline:
                    names["speedup"] = other.name
        alone = [other for other in group if other.plan.nproc == 1 and speeds[other.plan.id]]
        if row.plan.nproc > 1 and (one := _nearest(row, alone)):
            ratios["efficiency"] = speed / speeds[one.plan.id] / row.plan.nproc
            names["efficiency"] = one.name
    if peak and not _is_ddp(row):
        same_nproc = [other for other in group if other.plan.nproc == row.plan.nproc]
        replicated = [other for other in same_nproc if _is_ddp(other) and peaks[other.plan.id]]
        if ddp := _nearest(row, replicated):
            ratios["saving"] = 1 - peak / peaks[ddp.plan.id]
            names["saving"] = ddp.name
    return replace(row, **ratios, relative_to=names)


def run_settings(record: CellRecord) -> dict[str, Any]:
    """Return a record's config as `section.key` -> value, without the output folder."""
    settings = flat(record.config)
    settings.pop("training.output_dir", None)
    return settings


def differing_keys(a: CellRecord, b: CellRecord) -> list[str]:
    """Return the keys of the run file in which two cells differ, except their output folder."""
    settings_a, settings_b = run_settings(a), run_settings(b)
    keys = dict.fromkeys([*settings_a, *settings_b])
    return [key for key in keys if settings_a.get(key, ...) != settings_b.get(key, ...)]


def _nearest(row: Row, others: Sequence[Row]) -> Row | None:
    """Return the cell that differs from `row` in layout alone, and in the fewest keys."""
    choices = []
    for place, other in enumerate(others):
        if row.record and other.record:
            keys = differing_keys(row.record, other.record)
            if all(key.startswith(LAYOUT_PREFIX) or key == GLOBAL_BATCH for key in keys):
                choices.append((len(keys), place, other))
    return min(choices)[2] if choices else None


def _is_ddp(row: Row) -> bool:
    """Return whether each rank of a cell has the whole model, cut neither by pp nor by tp."""
    is_replicated = all(setting(row.record, "parallel", axis) in (1, None) for axis in ("pp", "tp"))
    facts = strategies().get(setting(row.record, "parallel", "data"))
    return is_replicated and facts is not None and facts.axis is not None and not facts.sharded


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
    """Return the values of each fact of the cells' environments, without repetition; of one that
    some cells do not have, with the number of those that do.
    """
    facts: dict[str, list[Any]] = {}
    present: Counter[str] = Counter()
    records = [row.record for row in rows if row.record]
    for record in records:
        kernels = {f"{name} kernel": kernel for name, kernel in record.kernels.items()}
        for key, value in (record.environment | kernels).items():
            present[key] += 1
            if value not in facts.setdefault(key, []):
                facts[key].append(value)
    for key, number in present.items():
        if number < len(records):
            values = " and ".join(map(str, facts[key]))
            facts[key] = [f"{values} in {number} of {len(records)} cells"]
    return facts


def counts(rows: Sequence[Row]) -> dict[State, int]:
    """Return the number of cells in each state that occurs, without noise controls."""
    states = [row.state for row in rows if not row.plan.control]
    return {state: states.count(state) for state in STATES if state in states}


def interleaved(rows: Sequence[Row]) -> bool:
    """Return whether the rounds of each group were interleaved, by the times at which they started.

    They were if every cell had begun round k before any cell began round k + 1. Without times, and
    with cells in jobs of their own, the answer is no.
    """
    cells = [row for row in rows if row.record and not row.plan.control]
    for group_rows in groups_of(cells).values():
        records = [row.record for row in group_rows if row.record]
        if any(entry.get("job") for record in records for entry in record.rounds):
            return False
        starts = [
            (entry.get("started") or "", number)
            for record in records
            for number, entry in enumerate(record.rounds)
        ]
        numbers = [number for _, number in sorted(starts)]
        if numbers != sorted(numbers) or not all(time for time, _ in starts):
            return False
    return True


def rounds_of(rows: Sequence[Row]) -> str:
    """Return how many good rounds the timed cells have: `3 rounds`, `2 to 3 rounds`, or nothing."""
    numbers = [row.num_good_rounds for row in rows if row.measured and row.plan.timed]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return counted(high, "round") if low == high else f"{low} to {high} rounds"
