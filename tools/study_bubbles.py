"""The bubbles of a study's pipelines: medians over rounds, which a cell's record does not have."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tools.study import Study

from shardwise.lab.report.tables import Row


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
        rounds = study.pipelines[row.plan.id]
        shares = [one["bubble"] for one in rounds]
        found.append(
            Bubble(
                row,
                row.plan.values.get("schedule", row.label),
                number,
                median(shares),
                (min(shares), max(shares)),
                pipeline["simulated"]["bubble"] if pipeline["simulated"] else None,
                (ranks - 1) / (chunks * number + ranks - 1),
            )
        )
    return sorted(found, key=lambda bubble: (bubble.schedule, bubble.microbatches))
