"""The files of a sweep: `sweep.json`, and a `record.json` for each cell. This file needs no torch.

The folder of a sweep has `sweep.json` (SweepRecord, with every cell that the sweep will have) and a
folder for each cell, named by its id. The folder of a cell has `run.yaml` (its complete run file),
`record.json` (CellRecord, with medians over the rounds that are done) and `round-K/`, K from 1: the
output folder of one `shardwise train`, to which `log.txt` is added.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from shardwise.base.records.record import RunRecord, Status

SWEEP, RECORD, RUN_FILE, LOG = "sweep.json", "record.json", "run.yaml", "log.txt"
LOCK = ".lock"
"""The file that a bench locks in its folder, and a job of one cell in the cell's. It is empty."""
MOST_OF_OTHERS = 0.1
"""More than this share of the machine's CPU time for other programs disturbs a round."""
CELL_ID = re.compile(r"(?!\.)[A-Za-z0-9._+-]{1,200}")
"""The ids that a cell may have: the folder of the cell has the same name."""
WEAK_SCALING = "weak scaling"
"""The end of the name of a group whose cells have equal work per process, not in total."""


@dataclass(frozen=True)
class Axis:
    """Something that a sweep varies, under one name."""

    name: str
    values: tuple[str, ...]  # names, in the order of the sweep
    keys: tuple[str, ...]  # keys that a value sets: `section.key` of the run file, or `nproc`
    compared: bool
    """Whether cells that differ only in this axis are compared.

    If not, each value has groups of its own.
    """


@dataclass(frozen=True)
class CellPlan:
    """One cell, as it is planned."""

    id: str  # the name of its folder
    values: dict[str, str]  # axis -> name of its value
    nproc: int
    group: str  # the cells of a group have equal work
    reference: str | None
    """The id of the cell whose losses must be equal; None for that cell, or without one."""
    control: bool = False
    """Whether it repeats the reference with other rounding.

    It shows how far rounding alone changes a loss.
    """
    baseline: str | None = None
    """The id of the cell to compare the speed with; None for that cell."""
    timed: bool = True
    """Whether it is timed. Else it has losses and bytes only, as with more processes than cores."""


@dataclass(frozen=True)
class SweepRecord:
    """A sweep, as it is planned."""

    title: str
    axes: tuple[Axis, ...]
    cells: tuple[CellPlan, ...]
    equal: dict[str, dict[str, Any]]  # group -> `section.key` -> the value that all its cells have
    rounds: int
    timeout_seconds: float  # for one run
    command: list[str]  # `shardwise bench ...`
    memory_rounds: int = 1  # rounds of each cell in which memory is measured
    schema_version: int = 1


@dataclass(frozen=True)
class Round:
    """One run of a cell."""

    status: Status
    reason: str = ""
    tokens_per_second: float | None = None
    step_seconds: dict[str, float] | None = None
    wall_seconds: float | None = None  # from the start of the process to its end
    started: str | None = None  # UTC, ISO 8601; shows that rounds were interleaved
    job: str | None = None  # job and node of a cell that does not take turns with the others
    others_share: float | None = None
    """The share of the machine's CPU time that other programs took meanwhile."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much that its times say little."""
        return (self.others_share or 0.0) > MOST_OF_OTHERS


@dataclass(frozen=True)
class CellRecord(RunRecord):
    """The record of a cell: that of a run, with medians over its rounds, and the rounds themselves.

    `losses` and all else that does not depend on time are those of the first good round.
    `largest_round_difference` is how far a loss of another round was from them at any step. It is 0
    where runs repeat bit for bit.
    """

    cell: dict[str, Any] = field(default_factory=dict)  # CellPlan as plain data
    command: list[str] = field(default_factory=list)  # command of one round
    rounds: list[dict[str, Any]] = field(default_factory=list)  # Round as plain data, in order
    spread: dict[str, list[float]] = field(default_factory=dict)
    """Figure -> [min, max] over the good rounds."""
    largest_round_difference: float = 0.0
