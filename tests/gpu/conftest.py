"""What `make gpu` asks of the tests here: which kernels to use, and a line per test as soon as it
has ended.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.gpu import kernels

if "SHARDWISE_GDN" in os.environ:
    kernels.choose(os.environ["SHARDWISE_GDN"])  # before any test imports a model


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get("SHARDWISE_GPU_REPORT")
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that has started the workers reports
    if path and (report.when == "call" or not report.passed):
        line: dict[str, object] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": report.duration,
        }
        line |= dict(report.user_properties)
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            line["reason"] = crash.message[-800:] if crash else report.longreprtext[-800:]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
