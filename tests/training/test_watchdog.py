"""A process in which nothing moves says where it stands, and ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.config import UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.training import export, loop, watchdog
from shardwise.training.build import build
from shardwise.training.checkpoint import Checkpointer
from tests.distributed import run_ranks
from tests.parity.harness import Cell, run_config

SECONDS = 0.5


def hang_in_python() -> None:
    time.sleep(60)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock


def work() -> None:
    for _ in range(10):
        time.sleep(SECONDS / 5)
        watchdog.beat()


def wait_for_a_disk() -> None:
    with watchdog.paused():
        time.sleep(3 * SECONDS)


def hang_after_a_pause() -> None:
    wait_for_a_disk()
    hang_in_python()


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


@pytest.mark.parametrize(
    ("function", "python_runs"), [(hang_in_python, True), (hang_in_c, False), (hang_after_a_pause, True)]
)
def test_what_hangs_is_ended_with_its_stack(function, python_runs, tmp_path):
    start = time.monotonic()
    assert run(function, tmp_path) == 1
    assert SECONDS < time.monotonic() - start < 15
    assert f"in {function.__name__}" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "called").exists() == python_runs
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("function", [work, wait_for_a_disk])
def test_what_moves_or_is_paused_is_left_alone_for_longer_than_the_limit(function, tmp_path):
    assert run(function, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"done"}


def save_on_a_slow_disk(folder: Path, seconds: list[float]) -> list[float] | str:
    """On each rank work of so many seconds, as for a checkpoint, and a wait for the others."""
    checkpointer = object.__new__(Checkpointer)
    checkpointer._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4 * SECONDS))
    mine = seconds[dist.get_rank()]
    with watchdog.watch(SECONDS, folder / f"stacks-{dist.get_rank()}.txt", lambda: None):
        try:
            return checkpointer._together(lambda: time.sleep(mine) or mine, folder)
        except RuntimeError as error:
            return str(error)


def test_ranks_that_save_wait_for_one_with_a_slow_disk_but_not_for_ever(tmp_path):
    slow = [0.0, 2 * SECONDS]
    assert run_ranks(2, save_on_a_slow_disk, tmp_path, slow) == [slow, slow]
    # One hangs: the other is told by the time-out of the save's own group.
    assert "Timed out" in run_ranks(2, save_on_a_slow_disk, tmp_path, [0.0, 8 * SECONDS])[0]


def start_with_much_to_read(folder: Path) -> str:
    def build_loaders(*_: object) -> None:
        time.sleep(3 * SECONDS)
        raise UserError("read to the end")

    loop.load_tokenizer, loop.build_loaders = lambda model: (), build_loaders
    cfg = run_config(Cell("llama", "single", "full"))
    with watchdog.watch(SECONDS, folder / "stacks.txt", lambda: None):
        try:
            loop.train(cfg, build_mesh(cfg, torch.device("cpu")))
        except UserError as error:
            return str(error)
    return ""


def test_reading_the_corpus_may_take_longer_than_a_step(tmp_path):
    assert run_ranks(1, start_with_much_to_read, tmp_path) == ["read to the end"]


def beats_of_an_export(folder: Path) -> tuple[int, int]:
    cfg = run_config(Cell("llama", "single", "full"))
    job = build(cfg, build_mesh(cfg, torch.device("cpu")))
    beats: list[None] = []
    export.beat = lambda: beats.append(None)
    export.save_result(job, cfg, folder)
    return len(beats), len(list(job.pm.named_parameters()))


def test_an_export_moves_with_every_tensor(tmp_path):
    ((beats, parameters),) = run_ranks(1, beats_of_an_export, tmp_path)
    assert beats == parameters > 1
