"""Print what the tests cost, by folder and of the most expensive files: CPU seconds, which no other
process changes.

The CPU time of a test is that of its process and of all processes that it has started and waited
for.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import PurePath
from typing import Any

import pytest

FILES = 12
"""Files that are printed, the most expensive ones."""


def cpu_seconds() -> float:
    """CPU time so far of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Durations:
    """A plugin that adds CPU time to every report and prints the sums; with xdist the controlling
    process does."""

    def __init__(self) -> None:
        self.mark = 0.0
        self.items: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()
        self.setting_up = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.mark = cpu_seconds()
        output = getattr(session.config, "workeroutput", None)
        if output is None:
            self.setting_up += self.mark
        else:
            output["setting_up"] = self.mark

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.setting_up += getattr(node, "workeroutput", {}).get("setting_up", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.mark = now - self.mark, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.items[file] += report.when == "call" or report.skipped
        self.cpu[file] += getattr(report, "cpu_seconds", 0.0)  # a worker that died measured none
        self.wall[file] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if sum(self.wall.values()) < 10:
            return
        folders = {
            file: "/".join(PurePath(file).parts[:2]) if file.count("/") > 1 else "tests"
            for file in self.cpu
        }
        terminalreporter.section("durations by folder")
        write = terminalreporter.write_line
        write(f"{'items':>6} {'CPU s':>8} {'wall s':>8}")
        for folder in sorted(set(folders.values()), key=lambda f: -self._sum(self.cpu, folders, f)):
            write(
                self._row(
                    folder,
                    *(self._sum(of, folders, folder) for of in (self.items, self.cpu, self.wall)),
                )
            )
        write(self._row("all", *(sum(of.values()) for of in (self.items, self.cpu, self.wall))))
        write(self._row("importing and collecting, all processes", 0, self.setting_up, 0))
        write("the most expensive files:")
        for file, cpu in self.cpu.most_common(FILES):
            write(self._row(file, self.items[file], cpu, self.wall[file]))

    @staticmethod
    def _sum(of: Counter[str], folders: dict[str, str], folder: str) -> float:
        return sum(value for file, value in of.items() if folders[file] == folder)

    @staticmethod
    def _row(name: str, items: float, cpu: float, wall: float) -> str:
        return f"{items:6.0f} {cpu:8.1f} {wall:8.1f}  {name}"
