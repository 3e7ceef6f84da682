"""One run at a time in an output folder, whatever starts it and however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.base.interfaces import Mesh
from shardwise.base.process.ending import RunError
from shardwise.base.process.world import World
from shardwise.base.records.record import MetricsFile
from shardwise.checkpoint import output_lock
from shardwise.checkpoint.output_lock import LOCK, Lock, locked
from shardwise.config import RunConfig, UserError
from shardwise.launch import local as launch
from tests.distributed import PATIENCE
from tests.launch.test_local import config, no_launcher
from tests.lock_holder import hold

__all__ = ["no_launcher"]  # a fixture that every test uses

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """Who finds the lock taken does not wait for it."""
    monkeypatch.setattr(output_lock, "WAIT_SECONDS", 0.3)


def wait_for(happened: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(folder: Path, world: World | None = None, env: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as error, locked(folder, world, env or {}):
        pass
    return str(error.value)


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path):
    with locked(tmp_path, None, {}):
        told = refused(tmp_path)
    assert f"process {os.getpid()} on {socket.gethostname()}" in told
    assert "choose another folder" in told
    with locked(tmp_path, None, {}):  # the first has ended
        pass


def run_for_long(cfg: RunConfig, mesh: Mesh) -> None:
    """Write steps until the test has seen the other run end."""
    folder = Path(cfg.training.output_dir)
    if dist.get_rank() == 0:
        with MetricsFile(folder / "metrics.jsonl") as metrics:
            for step in range(1, 4):
                metrics.write(step=step, seed=cfg.training.seed)
            wait_for((folder.parent / "one-has-ended").exists)
            metrics.write(step=4, seed=cfg.training.seed)
    dist.barrier()


def start(folder: Path, seed: int, nproc: int, codes: Any) -> None:
    codes.put(
        launch.launch(
            config(folder, "ddp" if nproc > 1 else "single", seed=seed), nproc, run_for_long
        )
    )


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_of_two_runs_started_into_one_folder_one_is_refused_and_the_other_is_whole(
    nproc, tmp_path, capfd
):
    codes = FORK.Queue()
    runs = [
        FORK.Process(target=start, args=(tmp_path / "run", seed, nproc, codes)) for seed in (0, 1)
    ]
    for run in runs:
        run.start()
    assert codes.get(timeout=PATIENCE) == 2
    (tmp_path / "one-has-ended").touch()
    assert codes.get(timeout=PATIENCE) == 0
    for run in runs:
        run.join(PATIENCE)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert len({row["seed"] for row in rows}) == 1
    assert not (
        tmp_path / "run" / "record.json"
    ).exists()  # of the refused one; this fake run writes none
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert "another run is writing there" in line


def held_by(method: str, folder: Path, lock: Lock | None) -> BaseProcess:
    ready = folder / f"ready-{method}"
    process = multiprocessing.get_context(method).Process(
        target=hold, args=(folder, ready, lock), daemon=True
    )
    process.start()
    wait_for(ready.exists)
    return process


def end(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_killed_run_holds_no_lock(tmp_path):
    process = held_by("fork", tmp_path, None)
    assert f"process {process.pid}" in refused(tmp_path)
    end(process)
    with locked(tmp_path, None, {}):
        pass


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_hold_the_lock_of_their_launcher(method, tmp_path):
    with locked(tmp_path, None, {}) as lock:
        process = held_by(method, tmp_path, lock)
    assert "another run" in refused(tmp_path)  # though the launcher is gone
    end(process)
    with locked(tmp_path, None, {}):
        pass


def test_the_last_ranks_of_a_run_that_was_killed_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(output_lock, "WAIT_SECONDS", PATIENCE)
    process = held_by("fork", tmp_path, None)
    assert process.pid is not None
    FORK.Process(target=lambda: (time.sleep(0.5), os.kill(process.pid, signal.SIGKILL))).start()
    with locked(tmp_path, None, {}):
        process.join()


def test_the_locks_of_a_host_that_died_are_waited_for_longer(tmp_path, monkeypatch):
    """A file server keeps them for a while: here another process has one, in a host's name."""
    monkeypatch.setattr(output_lock, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(output_lock, "LEASE_SECONDS", PATIENCE)
    process = held_by("fork", tmp_path, None)
    assert "another run" in refused(tmp_path, None, {})
    monkeypatch.setattr(output_lock.socket, "gethostname", lambda: "another host")
    assert process.pid is not None
    FORK.Process(target=lambda: (time.sleep(0.5), os.kill(process.pid, signal.SIGKILL))).start()
    with locked(tmp_path, None, {}):
        process.join()


def test_a_host_that_died_may_keep_its_lock_and_a_later_start_gets_it(tmp_path, monkeypatch):
    """NFS 3 keeps it until that host is up again, so a cluster has to start the run once more."""
    monkeypatch.setattr(output_lock, "WAIT_SECONDS", PATIENCE)
    monkeypatch.setattr(output_lock, "LEASE_SECONDS", 0.0)
    process = held_by("fork", tmp_path, None)
    monkeypatch.setattr(output_lock.socket, "gethostname", lambda: "another host")
    for world in (None, OTHER):
        with pytest.raises(RunError, match="has died, the file server still keeps its locks"):
            locked(tmp_path, world, at(1)).__enter__()
    end(process)
    with locked(tmp_path, None, {}):
        pass


FIRST, OTHER = (World(rank, 2, rank, "env://") for rank in (0, 1))


def at(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "host", "MASTER_PORT": str(port)}


def test_every_rank_of_torchrun_finds_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(output_lock, "LEASE_SECONDS", 1.0)
    with locked(tmp_path, OTHER, at(1)) as nothing:  # before its first rank is there
        assert nothing is None
    with locked(tmp_path, FIRST, at(1)), locked(tmp_path, OTHER, at(1)):
        assert "another run" in refused(tmp_path, FIRST, at(2))
        assert "another run" in refused(tmp_path, OTHER, at(2))
        assert "another run" in refused(tmp_path)


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path, monkeypatch):
    def open_nothing(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(output_lock.os, "open", open_nothing)
    assert "Read-only file system" in refused(tmp_path)


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    def write_nothing(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_lock.os, "pwrite", write_nothing)
    with pytest.raises(OSError, match="No space left"), locked(tmp_path, None, {}):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_of(number, tmp_path, monkeypatch, capsys):
    def no_lock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with locked(tmp_path, FIRST, at(1)), locked(tmp_path, OTHER, at(2)):
        pass
    assert "has no locks" in capsys.readouterr().err


def test_a_lock_leads_to_no_other_file(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / LOCK).symlink_to("precious")
    refused(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"
