"""A process in which nothing moves says where it stands, and ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.base.process import watchdog
from shardwise.base.process.ending import RunError
from shardwise.base.process.watchdog import watch
from shardwise.checkpoint import export
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.folder import complete
from shardwise.config import UserError
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.parallel.mesh import build_mesh
from shardwise.training import loop
from tests.checkpoint.test_checkpointer import config, start_run
from tests.distributed import PATIENCE, run_ranks
from tests.parity.harness import Cell, run_config

SECONDS = 1.0


def hang_in_python() -> None:
    time.sleep(2 * PATIENCE)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(2 * PATIENCE)  # keeps the interpreter's lock


def work() -> None:
    for _ in range(20):
        time.sleep(SECONDS / 10)
        watchdog.beat()


def wait_for_a_disk() -> None:
    with watchdog.paused():
        time.sleep(3 * SECONDS)


def hang_after_a_pause() -> None:
    wait_for_a_disk()
    hang_in_python()


def write_for_long() -> None:
    with watchdog.watched(), watchdog.paused():
        time.sleep(2 * PATIENCE)


def hang_beside_a_thread_that_writes() -> None:
    threading.Thread(target=write_for_long, daemon=True).start()
    hang_in_python()


def wait_for_a_thread_that_hangs() -> None:
    with ThreadPoolExecutor(1) as pool, watchdog.paused():
        pool.submit(watchdog.watched()(hang_in_python)).result()


def hang_where_no_thread_can_start() -> None:
    """As at a bound of memory: the interpreter's own watchdog is a thread."""

    def fails(*_: object, **__: object) -> None:
        watchdog.faulthandler.cancel_dump_traceback_later()  # as the real one does first
        raise RuntimeError("unable to start watchdog thread")

    watchdog.faulthandler.dump_traceback_later = fails
    work()
    hang_in_python()


def main(function, folder: Path) -> None:
    watchdog.GRACE_SECONDS = 0.5
    with watchdog.watch(SECONDS, folder / "stacks.txt", (folder / "called").touch):
        function()
    (folder / "done").touch()


def run(function, folder: Path) -> int:
    process = multiprocessing.get_context("fork").Process(target=main, args=(function, folder))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(
    ("function", "python_runs"),
    [
        (hang_in_python, True),
        (hang_in_c, False),
        (hang_after_a_pause, True),
        (hang_beside_a_thread_that_writes, True),
        (wait_for_a_thread_that_hangs, True),
        (hang_where_no_thread_can_start, True),
    ],
)
def test_what_hangs_is_ended_with_its_stack(function, python_runs, tmp_path):
    start = time.monotonic()
    assert run(function, tmp_path) == 1
    assert time.monotonic() - start > SECONDS
    assert f"in {function.__name__}" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "called").exists() == python_runs
    assert not (tmp_path / "done").exists()


def report_for(seconds: float, longest: float, folder: Path) -> None:
    watchdog.GRACE_SECONDS, watchdog.REPORT_SECONDS = 0.5, longest

    def report() -> None:
        time.sleep(seconds)
        (folder / "called").touch()

    with watchdog.watch(SECONDS, folder / "stacks.txt", report):
        hang_in_python()


@pytest.mark.parametrize(
    ("seconds", "longest", "ends"), [(2.0, PATIENCE, True), (PATIENCE, 1.0, False)]
)
def test_a_long_report_is_waited_for_but_not_for_ever(seconds, longest, ends, tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=report_for, args=(seconds, longest, tmp_path)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 1
    assert "in hang_in_python" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "called").exists() == ends


@pytest.mark.parametrize("function", [work, wait_for_a_disk])
def test_what_moves_or_is_paused_is_left_alone_for_longer_than_the_limit(function, tmp_path):
    assert run(function, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"done"}


def save(folder: Path, asynchronous: bool, seconds: list[float], limits: list[float]) -> None:
    """Save with a disk that takes so many seconds on each rank, under such time limits."""
    cfg = config(folder, async_save=asynchronous)
    _, make_step, checkpointer = start_run(replace(cfg, parallel=replace(cfg.parallel, data="ddp")))
    rank, header = dist.get_rank(), checkpoint_tensors._header

    def write_slowly(*args):
        time.sleep(seconds[rank])
        return header(*args)

    checkpoint_tensors._header = write_slowly
    make_step(1)
    with watchdog.watch(limits[rank], folder / f"stacks-{rank}.txt", lambda: None), checkpointer:
        checkpointer.save(1)
        checkpointer.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_takes_as_long_as_this_ranks_disk(asynchronous, tmp_path):
    run_ranks(2, save, tmp_path, asynchronous, [0.0, 5.0], [PATIENCE, 4.0])
    assert [path.name for path in complete(tmp_path)] == ["step-1"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_waits_in_a_save_for_a_rank_that_hangs_is_ended_with_its_stack(asynchronous, tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 died without a word"):
        run_ranks(2, save, tmp_path, asynchronous, [0.0, PATIENCE], [4.0, PATIENCE])
    assert "in _together" in (tmp_path / "stacks-0.txt").read_text()


def start_with_much_to_read(folder: Path) -> str:
    def build_loaders(*_: object) -> None:
        time.sleep(3 * SECONDS)
        raise UserError("read to the end")

    loop.load_tokenizer, loop.build_loaders = (
        lambda model, chat_template: SimpleNamespace(get_vocab=lambda: {"a": 0}),
        build_loaders,
    )
    cfg = run_config(Cell("llama", "single", "full"))
    with watchdog.watch(SECONDS, folder / "stacks.txt", lambda: None):
        try:
            loop.train(cfg, build_mesh(cfg, torch.device("cpu")), INSTRUMENTS)
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
    export.save_result(job, cfg, build_mesh(cfg, torch.device("cpu")), folder)
    return len(beats), len(list(job.pm.named_parameters()))


def test_an_export_moves_with_every_tensor(tmp_path):
    ((beats, parameters),) = run_ranks(1, beats_of_an_export, tmp_path)
    assert beats == parameters > 1


def test_a_folder_that_is_gone_before_the_watch_begins_is_one_line(tmp_path):
    with (
        pytest.raises(RunError, match="was the output folder removed"),
        watch(60.0, tmp_path / "gone" / "x", print),
    ):
        pass
