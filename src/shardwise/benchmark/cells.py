"""A cell as far as it has got, and its record: medians of what varies, the first good round's of what does not."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.benchmark.sweep import Cell
from shardwise.records.cell import CellPlan, CellRecord, Round
from shardwise.records.record import RunRecord

NOT_TIMED = "run for its losses and bytes, not timed (timed: false in the sweep)"


@dataclass
class CellState:
    """A cell and what is known of it so far."""

    cell: Cell
    folder: Path
    rounds: list[Round] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)  # what the rounds left, one each
    record: CellRecord | None = None  # its row

    def remaining(self, total: int) -> range:
        """The rounds (from 1) of `total` that are to run, as far as is known.

        A control and a cell that is not timed have one; once the first has gone wrong, there are no others.
        """
        if self.cell.refusal or (self.rounds and self.rounds[0].status != "ok"):
            return range(0)
        return range(len(self.rounds) + 1, (1 if self.cell.plan.control or not self.cell.plan.timed else total) + 1)


def cell_record(
    plan: CellPlan,
    rounds: Sequence[Round],
    records: Sequence[RunRecord],
    command: list[str],
    environment: dict[str, Any],
) -> CellRecord:
    """The record of a cell with these rounds (at least one) and what each of them left.

    Figures are medians over the rounds that went well, but for `pipeline`, which is that of the round whose measured
    step is the median; `environment` is added to the runs' own.
    """
    if not plan.timed:
        records = [_without_times(record) for record in records]
    good = [record for record in records if record.status == "ok"]
    first = good[0] if good else records[0]
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(RunRecord)}
    with_memory = next((record for record in good if record.memory_parts), first)
    fields["memory_parts"] = with_memory.memory_parts
    fields["environment"] = first.environment | environment
    fields["notes"] = first.notes + _notes(rounds, good)
    spread = {}
    if good:
        rates = {name: _present(getattr(r, name) for r in good) for name in ("tokens_per_second", "mfu", "hfu")}
        times = {
            n: [r.step_seconds[n] for r in good if r.step_seconds] for n in first.step_seconds or {} if n != "steps"
        }
        peaks = [r.peak_memory_bytes for r in good if r.peak_memory_bytes]
        states = [r.state_bytes for r in good if r.state_bytes]
        fields |= {name: statistics.median(values) if values else None for name, values in rates.items()}
        if first.step_seconds:
            fields["step_seconds"] = first.step_seconds | {name: statistics.median(v) for name, v in times.items()}
        fields["peak_memory_bytes"] = [_bytes(rank) for rank in zip(*peaks)] or None
        fields["state_bytes"] = [
            {name: _bytes([state[name] for state in rank]) for name in rank[0]} for rank in zip(*states)
        ] or None
        named = rates | {f"step_seconds.{name}": values for name, values in times.items()}
        named["peak_memory_bytes"] = [max(peak) for peak in peaks]
        fields["pipeline"], of_pipelines = _pipeline(good)
        named |= of_pipelines
        spread = {name: [min(values), max(values)] for name, values in named.items() if values}
    return CellRecord(
        **fields,
        cell=dataclasses.asdict(plan),
        command=command,
        rounds=[dataclasses.asdict(entry) for entry in rounds],
        spread=spread,
        largest_round_difference=max((_difference(first.losses, record.losses) for record in good), default=0.0),
    )


def _without_times(record: RunRecord) -> RunRecord:
    times = ("tokens_per_second", "step_seconds", "mfu", "hfu")
    pipeline = record.pipeline
    if pipeline is not None:
        pipeline = pipeline | dict.fromkeys(("measured", "simulator_error_percent", "events"))
    notes = [*record.notes, NOT_TIMED]
    return dataclasses.replace(record, **dict.fromkeys(times), pipeline=pipeline, notes=notes)


def _pipeline(good: Sequence[RunRecord]) -> tuple[dict[str, Any] | None, dict[str, list[float]]]:
    """The pipeline of the round whose measured step is the median, and of all rounds what varies."""
    measured = [record.pipeline for record in good if record.pipeline and record.pipeline["measured"]]
    if not measured:
        return good[0].pipeline, {}
    middle = sorted(measured, key=lambda pipeline: pipeline["measured"]["seconds"])[(len(measured) - 1) // 2]
    return middle, {
        "pipeline.seconds": [pipeline["measured"]["seconds"] for pipeline in measured],
        "pipeline.bubble": [pipeline["measured"]["bubble"] for pipeline in measured],
        "pipeline.simulator_error_percent": _present(pipeline["simulator_error_percent"] for pipeline in measured),
    }


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _bytes(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def _difference(a: list[float], b: list[float]) -> float:
    """The largest difference at any step; infinite where there are not equally many, or one is not a number."""
    if len(a) != len(b):
        return math.inf
    largest = max((abs(x - y) for x, y in zip(a, b)), default=0.0)
    return math.inf if any(math.isnan(loss) for loss in (*a, *b)) else largest


def _notes(rounds: Sequence[Round], good: Sequence[RunRecord]) -> list[str]:
    notes = []
    if good:
        notes = [f"round {i} was left out: {r.status}, {r.reason}" for i, r in enumerate(rounds, 1) if r.status != "ok"]
    for name in ("device", "commit", "torch", "transformers", "threads"):
        if len({str(record.environment.get(name)) for record in good}) > 1:
            notes.append(f"its rounds ran with another {name} each; run the cell again (--rerun)")
    return notes
