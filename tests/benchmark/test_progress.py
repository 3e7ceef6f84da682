"""What a person is told: time left, durations, one table at the end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise.benchmark.cells import CellState
from shardwise.benchmark.progress import duration, result_table, time_left
from shardwise.benchmark.sweep import Cell
from shardwise.records.cell import CellPlan, CellRecord, Round
from shardwise.records.record import Status


def state(*seconds: float, control: bool = False, status: Status = "ok") -> CellState:
    plan = CellPlan("a", {}, 1, "all cells", None, control)
    return CellState(Cell(plan, {}), Path("a"), [Round(status, wall_seconds=s) for s in seconds])


@pytest.mark.parametrize(
    ("states", "left"),
    [
        ([state(), state()], None),  # nothing to go by yet
        ([state(10.0), state()], 2 * 10 + 3 * 10),  # a cell that has not run yet takes the median of all rounds
        ([state(1.0, 5.0), state(30.0)], 1 * 3 + 2 * 30),
        ([state(10.0), state(control=True)], 2 * 10 + 1 * 10),  # a control has one round
        ([state(10.0), state(4.0, status="failed")], 2 * 10),  # what went wrong is not run again
        ([state(10.0, 10.0, 10.0)], 0),
    ],
)
def test_time_left_of_three_rounds(states, left):
    assert time_left(states, 3) == left


def test_a_round_that_runs_takes_of_its_own_time_only():
    running, other = state(10.0), state(10.0)
    assert time_left([running, other], 2, running, 4.0) == 6 + 10
    assert time_left([running, other], 2, running, 400.0) == 0 + 10


def test_durations():
    assert [duration(s) for s in (0.4, 59.4, 60, 200, 3900)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 05 min",
    ]


def test_the_table_at_the_end():
    def plan(name: str, control: bool = False) -> dict[str, Any]:
        return asdict(CellPlan(name, {}, 1, "all cells", None, control))

    good = CellRecord(
        "ok",
        {},
        tokens_per_second=1234.4,
        peak_memory_bytes=[2**20, 3 * 2**19],
        cell=plan("ddp"),
        rounds=[{}, {}, {}],
        spread={"tokens_per_second": [1000.0, 2000.0]},
    )
    full = CellRecord("oom", {}, "out of memory", cell=plan("single"), rounds=[{}])
    control = CellRecord("failed", {}, "was killed", cell=plan("control", control=True), rounds=[{}])
    assert result_table([good, full, control]).splitlines() == [
        "cell     status  rounds             tokens/s  peak MiB  reason",
        "ddp      ok           3  1,234 [1,000-2,000]       1.5",
        "single   oom          1                                 out of memory",
        "control  failed       1                                 control, for its losses alone; was killed",
    ]
