"""Runs beside the plan: what a row says, and a rehearsal."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.gpu import planned


def row() -> dict[str, Any]:
    return {
        "run": "a run",
        "status": "ok",
        "reason": "",
        "peak_bytes": 2**31,
        "step_seconds": {"p50": 0.5},
        "planned": {"total": 3 * 2**30, "overhead": 2**30},
        "seconds": {"here": {"total": 0.4}, "H200": {"total": 0.75}},
    }


def test_a_row_says_how_far_each_prediction_is_off():
    assert planned.cells(row())[2:] == ["2.00", "+0.0%", "500.0", "-20.0%", "+50.0%"]


def test_a_run_that_failed_has_its_reason():
    found = planned.measured({"status": "failed", "reason": "exit code 2", "record": None})
    cells = planned.cells({"run": "a run", **found})
    assert cells[:2] == ["a run", "failed: exit code 2"]
    assert len(cells) == len(planned.cells(row()))


@pytest.mark.slow
def test_a_rehearsal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planned", "--rehearse", str(tmp_path)])
    monkeypatch.chdir(tmp_path)  # the program changes the folder
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))  # and the cache
    assert planned.main() == 0
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["complete"]
    (of_run,) = result["rows"]
    assert of_run["seconds"]["here"]["total"] > 0
    assert (tmp_path / "calibration.json").exists()
