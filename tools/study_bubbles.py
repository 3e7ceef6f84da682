"""The bubbles of a study's pipelines: medians over rounds, which a cell's record does not have."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from study import Study

from shardwise.records.cell import RECORD
from shardwise.records.record import RunRecord
from shardwise.report.tables import Row


@dataclass(frozen=True)
class Bubble:
    """The idle share of a pipeline's step."""

    row: Row
    schedule: str
    microbatches: int
    measured: float
    """The median of all rounds."""
    range: tuple[float, float]
    """The least and the largest of all rounds."""
    simulated: float | None
    """By the measured costs of its units; None without them."""
    formula: float
    """(p - 1) / (v m + p - 1), with equal stages and messages that take no time."""
    step_error: float | None
    """How far the simulated step is from the measured one, in percent of the latter: the median."""


def bubbles(study: Study) -> list[Bubble]:
    """Return the bubbles of a study's pipelines, fewest micro-batches first."""
    found = []
    for row in study.rows:
        pipeline = row.record.pipeline if row.record and row.measured else None
        if pipeline is None or pipeline["measured"] is None or not row.plan.timed:
            continue
        assert row.record is not None
        training, parallel = row.record.config["training"], row.record.config["parallel"]
        number = training["global_batch_size"] // training["micro_batch_size"]
        ranks = parallel["pp"]
        chunks = len(pipeline["layers"]) // ranks
        shares, errors = over_rounds(study, row)
        found.append(
            Bubble(
                row,
                row.plan.values.get("schedule", row.label),
                number,
                median(shares),
                (min(shares), max(shares)),
                pipeline["simulated"]["bubble"] if pipeline["simulated"] else None,
                (ranks - 1) / (chunks * number + ranks - 1),
                median(errors) if errors else None,
            )
        )
    return sorted(found, key=lambda bubble: (bubble.schedule, bubble.microbatches))


def over_rounds(study: Study, row: Row) -> tuple[list[float], list[float]]:
    """Return the bubble of each good round, and how far the simulated step is off, in percent."""
    files = sorted((study.folder / row.plan.id).glob(f"round-*/{RECORD}"))
    records = [record for record in map(RunRecord.read, files) if record.status == "ok"]
    found = [record.pipeline for record in records if record.pipeline]
    errors = [pipeline["simulator_error_percent"] for pipeline in found]
    return (
        [pipeline["measured"]["bubble"] for pipeline in found],
        [error for error in errors if error is not None],
    )
