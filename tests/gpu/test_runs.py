"""Whole runs: what is compared, and a rehearsal."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future

import pytest

from tests.gpu import runs
from tests.gpu.runs import LEVERS, Lever, Sides, lever_row


def sides(**losses: list[float]) -> Sides:
    result: Sides = {}
    for side, curve in losses.items():
        record = {"losses": curve, "peak_memory_bytes": [5], "kernels": {}, "notes": []}
        record |= {"eval": [], "sample": None}
        result[side] = Future()
        result[side].set_result({"status": "ok", "reason": "", "record": record})
    return result


@pytest.mark.parametrize(("loss", "status"), [(2.9, "ok"), (2.6, "off"), (3.4, "off")])
def test_a_device_may_be_three_times_as_far_off_as_float32(loss, status):
    of = sides(device=[4.0, loss], cpu=[4.0, 3.0], float32=[4.0, 3.1])
    assert lever_row("lora", Lever(), of, of)["status"] == status


def test_a_run_that_failed_has_its_reason():
    of = sides(device=[4.0], cpu=[4.0], float32=[4.0])
    of["device"] = Future()
    of["device"].set_result({"status": "failed", "reason": "exit code 2", "record": None})
    row = lever_row("lora", Lever(), of, of)
    assert (row["status"], row["reason"]) == ("failed", "exit code 2")


@pytest.mark.parametrize(("needs", "status"), [((9, 9), "refused"), ((2, 0), "failed")])
def test_only_an_old_torch_may_refuse(needs, status):
    of = sides(device=[4.0], cpu=[4.0], float32=[4.0])
    of["device"] = Future()
    of["device"].set_result({"status": "refused", "reason": "old", "record": None})
    assert lever_row("lora", Lever(needs=needs), of, of)["status"] == status


def test_each_lever_is_like_one_that_the_cpu_runs():
    for lever in LEVERS.values():
        assert not lever.like or not LEVERS[lever.like].like


@pytest.mark.slow
def test_a_rehearsal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["runs", "--rehearse", str(tmp_path)])
    monkeypatch.chdir(tmp_path)  # the program changes the folder
    assert runs.main() == 0
    result = json.loads((tmp_path / "runs.json").read_text())
    (row,) = result["levers"]
    assert result["complete"]
    assert (row["lever"], row["status"], row["off_by"]) == ("lora", "ok", 0)
    assert row["by_rounding"] > 0
