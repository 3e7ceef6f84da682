"""What a sweep leaves for other programs: `sweep.json`, and a `record.json` for each of its cells. Needs no torch.

In the sweep's folder: `sweep.json` (SweepRecord: every cell that there is to be) and for each cell, in a folder named
by its id, `run.yaml` (its run file, as resolved), `record.json` (CellRecord: medians over the rounds that are done) and
`round-K/`, K from 1: the output folder of one `shardwise train`, with `log.txt` beside what that writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.records.record import RunRecord, Status

SWEEP, RECORD, RUN_FILE, LOG = "sweep.json", "record.json", "run.yaml", "log.txt"
WEAK_SCALING = "weak scaling"
"""How the name of a group ends whose cells have equal work for each process, not in all."""


@dataclass(frozen=True)
class Axis:
    """What is varied under one name."""

    name: str
    values: tuple[str, ...]  # names, in the sweep's order
    keys: tuple[str, ...]  # `section.key` of the run file, or `nproc`, that its values set
    compared: bool  # cells that differ in it alone are compared; else each value has comparison groups of its own


@dataclass(frozen=True)
class CellPlan:
    """One cell, before it ran."""

    id: str  # the name of its folder
    values: dict[str, str]  # axis -> name of its value
    nproc: int
    group: str  # cells of one group were given equal work
    reference: str | None  # id of the cell whose losses its own must equal, None for that cell itself or where none is
    control: bool = False  # the reference again, micro-batches in the other order: how far rounding alone moves a loss
    baseline: str | None = None  # id of the cell that its speed is set against; None for that cell itself
    timed: bool = True  # else it has losses and bytes alone, as of more processes than there are cores


@dataclass(frozen=True)
class SweepRecord:
    """What was asked of a bench."""

    title: str
    axes: tuple[Axis, ...]
    cells: tuple[CellPlan, ...]
    equal: dict[str, dict[str, Any]]  # group -> what its cells have in common: `section.key` -> value
    rounds: int
    timeout_seconds: float  # of one run
    command: list[str]  # `shardwise bench ...`
    memory_rounds: int = 1  # rounds of a cell in which memory is measured
    schema_version: int = 1


@dataclass(frozen=True)
class Round:
    """One run of a cell."""

    status: Status
    reason: str = ""
    tokens_per_second: float | None = None
    step_seconds: dict[str, float] | None = None
    wall_seconds: float | None = None  # from the start of the process to its end
    started: str | None = None  # UTC, ISO 8601: shows that rounds were interleaved


@dataclass(frozen=True)
class CellRecord(RunRecord):
    """A cell: a run's record whose figures are medians over its rounds, and what the rounds were.

    `losses` and what else does not depend on time are the first good round's; `largest_round_difference` is how far
    another round's loss was from them at any step (0 where runs repeat bit for bit).
    """

    cell: dict[str, Any] = field(default_factory=dict)  # CellPlan as plain data
    command: list[str] = field(default_factory=list)  # what one round ran
    rounds: list[dict[str, Any]] = field(default_factory=list)  # Round as plain data, in order
    spread: dict[str, list[float]] = field(default_factory=dict)  # figure -> [min, max] over the good rounds
    largest_round_difference: float = 0.0
