"""The table of CPU seconds that `make test` writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests.durations import Durations


def test_a_run_writes_its_folders_and_keeps_the_others(tmp_path):
    path = tmp_path / "results" / "cpu_seconds.json"
    first, second = Durations(), Durations()
    for durations, file, seconds in (
        (first, "tests/data/test_order.py", 1.25),
        (first, "tests/data/test_state.py", 2.5),
        (first, "tests/test_words.py", 0.5),
        (second, "tests/data/test_order.py", 1.0),
    ):
        report = SimpleNamespace(
            nodeid=f"{file}::test", when="call", skipped=False, cpu_seconds=seconds, duration=9.0
        )
        durations.pytest_runtest_logreport(report)
        durations.write(path)
    assert json.loads(path.read_text()) == {
        "tests": {"items": 1, "cpu_seconds": 0.5},
        "tests/data": {"items": 1, "cpu_seconds": 1.0},
    }
