"""Sides that are processes: one that dies or does not answer, and commands with a limit."""

from __future__ import annotations

import sys

import pytest

from tests.gpu.processes import Deadline, Worker, WorkerError, run_limited


def test_a_dead_worker_says_so_every_time(tmp_path):
    # Dead to us as soon as it closes its output, whatever it still does.
    code = "import os, time; os.close(1); time.sleep(60)"
    worker = Worker([sys.executable, "-c", code], tmp_path / "log")
    try:
        for _ in range(2):
            with pytest.raises(WorkerError, match="failed"):
                worker.ask({"do": "build"}, 30)
    finally:
        worker.end()


def test_no_answer_is_a_timeout(tmp_path):
    worker = Worker([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        with pytest.raises(WorkerError, match="timeout: no answer in 0 s"):
            worker.ask({"do": "build"}, 0.01)
    finally:
        worker.end()


def test_a_stage_is_stopped_at_its_limit(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    stopped = run_limited(sleep, tmp_path / "log", 0.05)
    assert stopped == {"status": "timeout", "reason": "stopped after 0 s"}
    fails = [sys.executable, "-c", "raise SystemExit('no device')"]
    failed = run_limited(fails, tmp_path / "log", 30)
    assert failed == {"status": "failed", "reason": "exit code 1: no device"}
    assert Deadline(0).left(30) == 0.0
    assert 29 < Deadline(60).left(30) <= 30
