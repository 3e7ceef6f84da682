"""Medians of rounds, on records made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.base.records.cell import CellPlan, CellRecord, Round
from shardwise.base.records.record import RunRecord, Status
from shardwise.lab.benchmark.cells import NOT_TIMED, CellState, cell_record
from shardwise.lab.benchmark.sweep import Cell

PLAN = CellPlan("ddp", {"strategy": "ddp"}, 2, "all cells", "single")


def run(
    rate: float = 1.0, losses: tuple[float, ...] = (2.0, 1.0), status: Status = "ok", **fields: Any
) -> RunRecord:
    return RunRecord(status, {"a": {}}, losses=list(losses), tokens_per_second=rate, **fields)


def record(*runs: RunRecord) -> CellRecord:
    rounds = [Round(r.status, r.reason, r.tokens_per_second) for r in runs]
    return cell_record(PLAN, rounds, runs, ["shardwise", "train"], {"OMP_NUM_THREADS": "1"})


def test_figures_are_medians_with_their_range():
    made = record(
        *(
            run(
                rate,
                samples_per_second=rate / 2,
                step_seconds={"mean": seconds, "p50": 2 * seconds, "steps": 5},
                mfu=rate / 100,
                first_step_seconds=seconds + 5,
                peak_memory_bytes=[peak, 7],
                state_bytes=[{"weights": peak, "gradients": 1}, {"weights": 3, "gradients": 1}],
            )
            for rate, seconds, peak in ((10.0, 3.0, 100), (30.0, 1.0, 104), (11.0, 2.0, 101))
        )
    )
    assert (made.status, made.tokens_per_second, made.mfu, made.hfu) == ("ok", 11.0, 0.11, None)
    assert made.step_seconds == {"mean": 2.0, "p50": 4.0, "steps": 5}
    assert made.first_step_seconds == 7.0
    assert made.peak_memory_bytes == [101, 7]
    assert made.state_bytes == [{"weights": 101, "gradients": 1}, {"weights": 3, "gradients": 1}]
    assert made.spread == {
        "tokens_per_second": [10.0, 30.0],
        "samples_per_second": [5.0, 15.0],
        "mfu": [0.1, 0.3],
        "first_step_seconds": [6.0, 8.0],
        "step_seconds.mean": [1.0, 3.0],
        "step_seconds.p50": [2.0, 6.0],
        "peak_memory_bytes": [100, 104],
    }
    assert made.environment == {"OMP_NUM_THREADS": "1"}
    assert made.cell["id"] == "ddp"
    assert (
        record(run(10.0), run(20.0)).tokens_per_second == 15.0
    )  # of an even number the mean of the middle two


def test_memory_comes_from_the_rounds_that_measured_it():
    parts = [{"weights": 60, "temporary": 40}]
    sent = {"sent_bytes_per_step": [9], "sent_bytes_by_formula": [8]}
    states = [{"weights": 60}]
    with_memory = run(peak_memory_bytes=[100], memory_parts=parts, state_bytes=states, **sent)
    for rounds in ((with_memory, run(), run()), (run(), with_memory)):
        made = record(*rounds)
        assert (made.peak_memory_bytes, made.memory_parts, made.state_bytes) == (
            [100],
            parts,
            [{"weights": 60}],
        )
        assert made.spread["peak_memory_bytes"] == [100, 100]
        assert {name: getattr(made, name) for name in sent} == sent


def test_a_cell_that_is_not_timed_has_losses_and_bytes():
    measured = {
        "measured": {"seconds": 1.0},
        "simulator_error_percent": 1.0,
        "events": ["a"],
        "split": "uniform",
    }
    ran = run(
        10.0,
        peak_memory_bytes=[100],
        step_seconds={"mean": 1.0},
        mfu=0.1,
        hfu=0.2,
        first_step_seconds=3.0,
        pipeline=measured,
    )
    made = cell_record(replace(PLAN, timed=False), [Round("ok")], [ran], [], {})
    times = (made.tokens_per_second, made.step_seconds, made.first_step_seconds, made.mfu, made.hfu)
    assert times == (None,) * 5
    assert (made.losses, made.peak_memory_bytes, list(made.spread)) == (
        [2.0, 1.0],
        [100],
        ["peak_memory_bytes"],
    )
    assert made.pipeline == {
        "measured": None,
        "simulator_error_percent": None,
        "events": None,
        "split": "uniform",
    }
    assert made.notes == [NOT_TIMED]
    state = CellState(Cell(replace(PLAN, timed=False), {}), Path("a"))
    assert list(state.remaining(3)) == [1]


def pipeline(seconds: float, error: float | None = None) -> dict[str, Any]:
    return {
        "measured": {"seconds": seconds, "bubble": seconds / 10},
        "simulator_error_percent": error,
    }


def test_the_pipeline_comes_from_the_median_round():
    made = record(*(run(pipeline=pipeline(seconds, seconds - 3)) for seconds in (5.0, 2.0, 4.0)))
    assert made.pipeline == pipeline(4.0, 1.0)
    assert made.spread["pipeline.seconds"] == [2.0, 5.0]
    assert made.spread["pipeline.bubble"] == [0.2, 0.5]
    assert made.spread["pipeline.simulator_error_percent"] == [-1.0, 2.0]
    assert (
        "pipeline.simulator_error_percent" not in record(run(pipeline=pipeline(1.0))).spread
    )  # costs by FLOPs
    untimed = {"measured": None, "simulator_error_percent": None}
    assert record(run(pipeline=untimed)).pipeline == untimed


def test_a_failed_round_is_left_out_with_a_note():
    made = record(run(10.0), run(99.0, status="failed", reason="was killed"), run(20.0))
    assert (made.status, made.tokens_per_second, made.spread["tokens_per_second"]) == (
        "ok",
        15.0,
        [10.0, 20.0],
    )
    (note,) = made.notes
    assert "Round 2" in note
    assert "failed, was killed" in note
    assert [entry["status"] for entry in made.rounds] == ["ok", "failed", "ok"]


def test_without_a_good_round_there_is_a_reason_and_no_figure():
    made = record(RunRecord("oom", {"a": {}}, "out of memory"))
    assert (made.status, made.reason, made.tokens_per_second, made.spread) == (
        "oom",
        "out of memory",
        None,
        {},
    )
    assert made.notes == []


def test_the_largest_difference_between_rounds_is_recorded(tmp_path):
    assert record(run(), run()).largest_round_difference == 0.0
    # |1.0 - 1.25| at the second step is the largest
    assert (
        record(run(), run(losses=(2.125, 1.0)), run(losses=(2.0, 1.25))).largest_round_difference
        == 0.25
    )
    for losses in ((2.0,), (2.0, math.nan)):
        made = record(run(), run(losses=losses))
        made.write(tmp_path / "record.json")
        assert CellRecord.read(tmp_path / "record.json") == made
        assert made.largest_round_difference == math.inf
        assert (
            json.loads((tmp_path / "record.json").read_text())["largest_round_difference"] == "inf"
        )


def test_rounds_from_two_commits_have_a_note():
    made = record(*(run(environment={"commit": commit}) for commit in ("a", "b")))
    (note,) = made.notes
    assert "commit" in note
    assert "--rerun" in note
