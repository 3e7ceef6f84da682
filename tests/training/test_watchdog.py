"""A process in which nothing moves says where it stands, and ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from pathlib import Path

import pytest

from shardwise.training import watchdog

SECONDS = 0.5


def hang_in_python() -> None:
    time.sleep(60)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock


def work() -> None:
    for _ in range(10):
        time.sleep(SECONDS / 5)
        watchdog.beat()


def main(function, folder: Path) -> None:
    watchdog.GRACE_SECONDS = 0.5
    with watchdog.watch(SECONDS, folder / "stacks.txt", (folder / "called").touch):
        function()
    (folder / "done").touch()


def run(function, folder: Path) -> int:
    process = multiprocessing.get_context("fork").Process(target=main, args=(function, folder))
    process.start()
    process.join(20)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(("function", "python_runs"), [(hang_in_python, True), (hang_in_c, False)])
def test_what_hangs_is_ended_with_its_stack(function, python_runs, tmp_path):
    start = time.monotonic()
    assert run(function, tmp_path) == 1
    assert SECONDS < time.monotonic() - start < 15
    assert f"in {function.__name__}" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "called").exists() == python_runs
    assert not (tmp_path / "done").exists()


def test_what_moves_is_left_alone_for_longer_than_the_limit(tmp_path):
    assert run(work, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"done"}
