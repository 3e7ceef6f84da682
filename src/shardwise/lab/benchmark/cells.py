"""The state of a cell during a bench, and its record.

In a record, figures that vary between rounds are medians; all others are those of the first good
round.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.base.records.cell import CellPlan, CellRecord, Round
from shardwise.base.records.record import RunRecord
from shardwise.lab.benchmark.sweep import Cell

NOT_TIMED = "Ran for losses and bytes alone, and is not timed (timed: false in the sweep)."
RATES = ("tokens_per_second", "samples_per_second", "mfu", "hfu")
MEDIANS = (*RATES, "first_step_seconds")
ALONE = (
    "This cell ran in a job of its own on a cluster, not in turns with other cells: a difference "
    "in speed may come from the node or from what else ran at that time."
)
SAME_IN_ALL_ROUNDS = ("device", "commit", "torch", "transformers", "threads")
"""Facts of the environment that must not change between the rounds of a cell."""


@dataclass
class CellState:
    """A cell, and the rounds of it that have ended."""

    cell: Cell
    folder: Path
    rounds: list[Round] = field(default_factory=list)
    run_records: list[RunRecord] = field(default_factory=list)  # one for each round
    record: CellRecord | None = None  # the cell's; None before its first round

    def remaining(self, total: int) -> range:
        """Return the rounds (from 1) that are still to run if each cell has `total` of them.

        A control, and a cell that is not timed, has one round. A cell whose first round failed has
        no further ones.
        """
        first_failed = bool(self.rounds) and self.rounds[0].status != "ok"
        if self.cell.refusal or first_failed:
            return range(0)
        has_one = self.cell.plan.control or not self.cell.plan.timed
        return range(len(self.rounds) + 1, (1 if has_one else total) + 1)


def cell_record(
    plan: CellPlan,
    rounds: Sequence[Round],
    run_records: Sequence[RunRecord],
    command: list[str],
    environment: dict[str, Any],
) -> CellRecord:
    """Return the record of a cell.

    `rounds` (one at least) and `run_records` belong together, one of each per round. Figures are
    medians over the good rounds, except `pipeline`: it is that of the round whose measured step is
    the median. `environment` is added to that of the runs.
    """
    if not plan.timed:
        run_records = [_without_times(record) for record in run_records]
    good = [record for record in run_records if record.status == "ok"]
    first = good[0] if good else run_records[0]
    fields = {entry.name: getattr(first, entry.name) for entry in dataclasses.fields(RunRecord)}
    with_memory = next((record for record in good if record.memory_parts), first)
    for name in ("memory_parts", "sent_bytes_per_step", "sent_bytes_by_formula"):
        fields[name] = getattr(with_memory, name)
    fields["environment"] = first.environment | environment
    fields["notes"] = first.notes + _notes(rounds, good)
    spread = {}
    if good:
        medians, per_round = _figures(good)
        fields |= medians
        spread = {name: [min(values), max(values)] for name, values in per_round.items() if values}
    return CellRecord(
        **fields,
        cell=dataclasses.asdict(plan),
        command=command,
        rounds=[dataclasses.asdict(entry) for entry in rounds],
        spread=spread,
        largest_round_difference=max(
            (_difference(first.losses, record.losses) for record in good), default=0.0
        ),
    )


def _figures(good: Sequence[RunRecord]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the fields of a cell's record that are medians, and each figure's values by round."""
    fields: dict[str, Any] = {}
    per_round: dict[str, list[float]] = {}
    for name in MEDIANS:
        per_round[name] = _present(getattr(record, name) for record in good)
        fields[name] = statistics.median(per_round[name]) if per_round[name] else None

    first_times = good[0].step_seconds
    if first_times:
        times = {
            name: [record.step_seconds[name] for record in good if record.step_seconds]
            for name in first_times
            if name != "steps"
        }
        medians = {name: statistics.median(values) for name, values in times.items()}
        fields["step_seconds"] = first_times | medians
        per_round |= {f"step_seconds.{name}": values for name, values in times.items()}

    peaks = [record.peak_memory_bytes for record in good if record.peak_memory_bytes]
    states = [record.state_bytes for record in good if record.state_bytes]
    fields["peak_memory_bytes"] = [_median_bytes(values) for values in zip(*peaks)] or None
    fields["state_bytes"] = [_median_state(values) for values in zip(*states)] or None
    per_round["peak_memory_bytes"] = [max(rank_peaks) for rank_peaks in peaks]

    fields["pipeline"], pipeline_figures = _pipeline(good)
    return fields, per_round | pipeline_figures


def _without_times(record: RunRecord) -> RunRecord:
    """Return a run's record without its times and rates, with a note that says so."""
    pipeline = record.pipeline
    if pipeline is not None:
        pipeline = pipeline | {"measured": None, "simulator_error_percent": None, "events": None}
    return dataclasses.replace(
        record,
        **dict.fromkeys(MEDIANS),
        step_seconds=None,
        pipeline=pipeline,
        notes=[*record.notes, NOT_TIMED],
    )


def _pipeline(good: Sequence[RunRecord]) -> tuple[dict[str, Any] | None, dict[str, list[float]]]:
    """Return the pipeline of the median round, and the figures of all rounds."""
    pipelines = [record.pipeline for record in good if record.pipeline]
    measured = [pipeline for pipeline in pipelines if pipeline["measured"]]
    if not measured:
        return good[0].pipeline, {}
    by_seconds = sorted(measured, key=lambda pipeline: pipeline["measured"]["seconds"])
    middle = by_seconds[(len(by_seconds) - 1) // 2]
    errors = _present(pipeline["simulator_error_percent"] for pipeline in measured)
    return middle, {
        "pipeline.seconds": [pipeline["measured"]["seconds"] for pipeline in measured],
        "pipeline.bubble": [pipeline["measured"]["bubble"] for pipeline in measured],
        "pipeline.simulator_error_percent": errors,
    }


def _present(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def _median_bytes(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def _median_state(states: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the median of each part of one rank's state over the rounds, in bytes."""
    return {name: _median_bytes([state[name] for state in states]) for name in states[0]}


def _difference(a: list[float], b: list[float]) -> float:
    """Return the largest difference of two runs' losses; infinity where one is missing or NaN."""
    if len(a) != len(b) or any(math.isnan(loss) for loss in (*a, *b)):
        return math.inf
    return max((abs(x - y) for x, y in zip(a, b)), default=0.0)


def _notes(rounds: Sequence[Round], good: Sequence[RunRecord]) -> list[str]:
    """Return notes on jobs, on rounds that failed after a good one, and on other environments."""
    jobs = dict.fromkeys(entry.job for entry in rounds if entry.job)
    notes = [ALONE] if jobs else []
    if len(jobs) > 1:
        notes.append(f"Its rounds ran in several jobs: {'; '.join(jobs)}.")
    if good:
        notes += [
            f"Round {i} is left out: {', '.join(filter(None, (entry.status, entry.reason)))}."
            for i, entry in enumerate(rounds, start=1)
            if entry.status != "ok"
        ]
    for name in SAME_IN_ALL_ROUNDS:
        if len({str(record.environment.get(name)) for record in good}) > 1:
            notes.append(f"The {name} is not the same in all rounds; run the cell again (--rerun).")
    return notes
