"""The output of a bench: a line for each run with the time left, and one table at the end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.records.cell import CellPlan, CellRecord, Round
from shardwise.base.records.record import Status
from shardwise.lab.benchmark.cells import CellState
from shardwise.lab.benchmark.progress import print_end, print_start, result_table, time_left
from shardwise.lab.benchmark.sweep import Cell


def state(*seconds: float, control: bool = False, status: Status = "ok") -> CellState:
    plan = CellPlan("a", {}, 1, "all cells", None, control)
    return CellState(Cell(plan, {}), Path("a"), [Round(status, wall_seconds=s) for s in seconds])


@pytest.mark.parametrize(
    ("states", "left"),
    [
        (
            [state(10.0), state()],
            2 * 10 + 3 * 10,
        ),  # a cell that has not run yet takes the median of all rounds
        ([state(1.0, 5.0), state(30.0)], 1 * 3 + 2 * 30),
        ([state(10.0), state(control=True)], 2 * 10 + 1 * 10),  # a control has one round
        ([state(10.0), state(4.0, status="failed")], 2 * 10),  # a failed cell does not run again
        ([state(10.0, 10.0, 10.0)], 0),
    ],
)
def test_time_left_of_three_rounds(states, left):
    assert time_left(states, 3) == left


def test_a_run_has_a_line(capsys):
    cell, other = state(), state(10.0)
    print_start(cell, [cell, other], 3)
    assert capsys.readouterr().out == "run 2 of 6: a, round 1: "
    cell.rounds.append(Round("ok", tokens_per_second=1234.4, wall_seconds=20.0))
    print_end(cell, [cell, other], 3)
    # Two rounds of 20 seconds and two of 10 are left.
    assert capsys.readouterr().out == "ok, 1,234 tokens/s, 20.0 s; 1 min 00 s left\n"
    cell.rounds.append(Round("oom", "out of memory", wall_seconds=1.0))
    print_end(cell, [cell, other], 3)
    assert capsys.readouterr().out.startswith("oom, out of memory, 1.0 s; ")
    for share, others in ((0.1, ""), (0.34, ", other programs took 34% of the CPUs")):
        cell.rounds.append(Round("ok", "", 900.0, wall_seconds=1.0, others_share=share))
        print_end(cell, [cell, other], 5)
        assert capsys.readouterr().out.startswith(f"ok, 900 tokens/s{others}, 1.0 s; ")


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
    control = CellRecord(
        "failed", {}, "was killed", cell=plan("control", control=True), rounds=[{}]
    )
    head, *lines = result_table([good, full, control]).splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["ddp", "ok", "3"],
        ["single", "oom", "1"],
        ["control", "failed", "1"],
    ]
    assert lines[0].split()[3:] == ["1,234", "[1,000-2,000]", "1.5"]
    for line, reason in zip(lines[1:], ("out of memory", "was killed"), strict=True):
        assert line.endswith(reason)
    # Numbers end below the names of their columns.
    for name, text in (("rounds", "3"), ("tokens/s", "2,000]"), ("peak MiB", "1.5")):
        assert lines[0].index(text) + len(text) == head.index(name) + len(name)
