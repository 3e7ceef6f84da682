"""Runs in forks of a preloaded server: how they end, and that no process outlives the call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from shardwise.lab.benchmark import process
from shardwise.lab.benchmark.process import Preloaded
from tests.benchmark.test_runner import real
from tests.distributed import PATIENCE


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> Iterator[Preloaded]:
    with Preloaded() as server:
        server.run(
            ["none.yaml"], tmp_path_factory.mktemp("first") / "log.txt", PATIENCE
        )  # its own log, too
        yield server


def run_file(folder: Path, steps: int) -> Path:
    """Write the run file of one process with so many steps."""
    content = real(folder, steps)
    content["training"]["output_dir"] = str(folder / "out")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def wait_for_steps(folder: Path) -> None:
    metrics, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.exists() or not metrics.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_of(log: Path) -> list[psutil.Process]:
    """Return the processes that write into this log."""
    writers = []
    for one in psutil.process_iter():
        try:
            if (
                os.readlink(f"/proc/{one.pid}/fd/1") == str(log)
                and one.status() != psutil.STATUS_ZOMBIE
            ):
                writers.append(one)
        except OSError:
            pass
    return writers


def assert_ended(log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while group_of(log):
        assert time.monotonic() < deadline, group_of(log)
        time.sleep(0.02)


def test_runs_end_as_if_each_were_a_process_of_its_own(preloaded, tmp_path):
    log = tmp_path / "log.txt"
    assert preloaded.run([str(tmp_path / "none.yaml")], log, PATIENCE) == 2
    (line,) = log.read_text().splitlines()
    assert line.startswith(f"error: {tmp_path}/none.yaml")
    assert preloaded.run([str(run_file(tmp_path, 2))], log, PATIENCE) == 0
    assert log.read_text().startswith("llama on cpu, one process")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert (record["status"], len(record["losses"])) == ("ok", 2)
    assert_ended(log)
    # Libraries read their environment when they are loaded, so the server has that of the bench.
    assert psutil.Process(preloaded._server.pid).environ().get("OMP_NUM_THREADS") == os.environ.get(
        "OMP_NUM_THREADS"
    )


def test_processes_of_a_killed_run_end_too(preloaded, tmp_path):
    log, path = tmp_path / "log.txt", run_file(tmp_path, 100_000)

    def kill() -> None:
        wait_for_steps(tmp_path)
        leader = next(one for one in group_of(log) if os.getpgid(one.pid) == one.pid)
        leader.send_signal(signal.SIGKILL)

    threading.Thread(target=kill).start()
    assert preloaded.run([str(path)], log, PATIENCE) == -signal.SIGKILL
    assert_ended(log)


def test_the_limit_and_the_death_of_the_server_end_a_run(tmp_path, monkeypatch):
    log, path = tmp_path / "log.txt", run_file(tmp_path, 100_000)
    with Preloaded() as preloaded:

        def kill() -> None:
            wait_for_steps(tmp_path)
            os.kill(preloaded._server.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        assert preloaded.run([str(path)], log, PATIENCE) == -signal.SIGKILL
        assert_ended(log)
        # The next run starts a new server, which hangs here.
        monkeypatch.setattr(process, "PRELOADED", ("/bin/sh", "-c", "sleep 600", "sh"))
        assert preloaded.run([str(path)], log, 0.5) is None
        assert_ended(log)
        # A server that cannot start leaves its error in the log.
        monkeypatch.setattr(process, "PRELOADED", ("/bin/sh", "-c", "echo no torch; exit 7", "sh"))
        assert preloaded.run([str(path)], log, PATIENCE) == 7
        assert log.read_text() == "no torch\n"


def test_on_a_gpu_each_run_is_a_new_process(tmp_path, monkeypatch):
    # A stand-in for the server, whose first message says that it must not fork.
    script = (
        "import socket, sys; socket.socket(fileno=int(sys.argv[1])).send(b'{\"forks\": false}')"
    )
    monkeypatch.setattr(process, "PRELOADED", (process.sys.executable, "-c", script))
    monkeypatch.setattr(process, "TRAIN", ("echo", "train"))
    with Preloaded() as preloaded:
        for word in ("a", "b"):
            assert preloaded.run([word], tmp_path / "log.txt", PATIENCE) == 0
            assert (tmp_path / "log.txt").read_text() == f"train {word}\n"


BURN = "import time\nwhile time.process_time() < 1.5: pass\n"


def test_what_a_run_takes_is_not_that_of_others(tmp_path):
    def own(*command: str) -> float:
        """The CPU time that counts as the command's, of all that the machine spends meanwhile."""

        def seconds() -> float:
            times = psutil.cpu_times()._asdict()
            return sum(times[kind] for kind in process.BUSY) - process._seconds_of_others()

        before = seconds()
        subprocess.run(command, check=True)
        return seconds() - before

    python, ended = sys.executable, tmp_path / "ended"
    of_a_grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    assert own(python, "-c", of_a_grandchild) > 1.4  # clocks tick each 0.01 s
    # A process whose parent has ended belongs to none of ours.
    burn = f"{BURN}open({str(ended)!r}, 'w')"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    wait = f"until [ -e {ended} ]; do sleep 0.5; done"
    assert own("sh", "-c", f'"{python}" -c "$1"; {wait}', "sh", leave) < 1.0


def test_a_round_says_what_others_took(tmp_path):
    def run(*_: object) -> int:
        time.sleep(0.2)
        return 0

    share = process.timed(run, [], tmp_path / "round", 1.0).others_share
    assert share is not None
    assert 0 <= share < 1.2  # clocks tick each 0.01 s
    assert process.timed(lambda *_: None, [], tmp_path / "round", 1.0).others_share is None
