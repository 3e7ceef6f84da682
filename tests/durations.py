"""Print what the tests cost, by folder and of the most expensive files: CPU seconds, which no other
process changes. With `--cpu-seconds FILE`, also write the sums of each folder into a JSON file.

The CPU time of a test is that of its process and of all processes that it has started and waited
for.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path, PurePath
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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = session.config.getoption("cpu_seconds")
        if path is not None and not hasattr(session.config, "workerinput"):
            self.write(Path(path))

    def write(self, path: Path) -> None:
        """Write items and CPU seconds of the folders that ran; the others keep their numbers."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        folders = self._folders()
        for folder in set(folders.values()):
            items, cpu = (self._sum(of, folders, folder) for of in (self.items, self.cpu))
            kept[folder] = {"items": int(items), "cpu_seconds": round(cpu, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")

    def _folders(self) -> dict[str, str]:
        """Return the folder of each file that ran, as the table names it."""
        return {
            file: "/".join(PurePath(file).parts[:2]) if file.count("/") > 1 else "tests"
            for file in self.cpu
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if sum(self.wall.values()) < 10:
            return
        folders = self._folders()
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
