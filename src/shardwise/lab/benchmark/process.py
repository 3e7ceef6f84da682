"""Starts the runs of a bench, each in a process group with a time limit.

No process of a run outlives the call.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from shardwise.base.records.cell import LOG

TRAIN = (sys.executable, "-m", "shardwise", "train")
PRELOADED = (sys.executable, "-m", "shardwise.lab.preloaded")
LEASH = 'exec 3<&0 </dev/null; ({ read _ <&3; kill -KILL 0; } >/dev/null 2>&1 &); exec "$@" 3<&-'
"""A shell script that becomes the command "$@" and leaves a watcher in its process group.

The watcher kills the group as soon as standard input closes. The kernel closes it when the bench
dies, even by SIGKILL.
"""
LONGEST_MESSAGE = 2**16
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""The times of a CPU at work, by psutil's names; `user` includes the time of guests."""

Run = Callable[[Sequence[str], Path, float], int | None]
"""Runs `shardwise train` with arguments, a log file and a limit in seconds.

Returns the exit code (negative for a signal), or None where the run took longer than the limit and
was killed.
"""


class ProcessOutcome(NamedTuple):
    """How a run ended."""

    code: int | None
    """The exit code, as `Run` returns it."""
    seconds: float
    started: str
    threads: str | None
    """OMP_NUM_THREADS of its processes."""
    others_share: float | None = None
    """The share of the machine's CPU time that other programs took meanwhile; None where that is
    not known."""


def now() -> str:
    """Return the time as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def timed(run: Run, arguments: Sequence[str], folder: Path, limit: float) -> ProcessOutcome:
    """Run `shardwise train` into a new folder, which may hold what an interrupted bench left."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    started = now()
    begin, others = time.monotonic(), _seconds_of_others()
    code = run(arguments, folder / LOG, limit)
    seconds, others = time.monotonic() - begin, _seconds_of_others() - others
    # After a run that was killed, nobody knows what it took.
    is_known = sys.platform == "linux" and code is not None
    share = max(0.0, others / seconds / (os.cpu_count() or 1)) if is_known else None
    return ProcessOutcome(code, seconds, started, os.environ.get("OMP_NUM_THREADS"), share)


def _seconds_of_others() -> float:
    """Return the CPU time that this machine has spent on all but this process and its children.

    It grows by what other programs take, and by what a hypervisor gives to other machines.
    """
    times = psutil.cpu_times()._asdict()
    total = sum(times[kind] for kind in BUSY if kind in times)
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total -= sum(process.cpu_times()[:4])  # with those of its children that have ended
    return total


@contextlib.contextmanager
def runs(train: Sequence[str] | None) -> Generator[Run]:
    """Give the function that starts the runs of a bench.

    `train` is the command of a run. Without it, on Linux, runs are forks of one process that has
    imported all they need.
    """
    if train is None and sys.platform == "linux":
        with Preloaded() as preloaded:
            yield preloaded.run
    else:
        command = train or TRAIN
        yield lambda arguments, log, limit: run_command([*command, *arguments], log, limit)


def run_command(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Run a command with its output in `log`; see `Run`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["/bin/sh", "-c", LEASH, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process.pid)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _kill(group: int) -> None:
    # While the watcher lives, the system gives the number of its group to no other process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Preloaded:
    """Runs in forks of one server, `shardwise.lab.preloaded`, which starts with the first run.

    CUDA does not survive a fork. On a machine with a GPU each run is therefore a new Python
    process.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._forks = True

    def __enter__(self) -> "Preloaded":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, arguments: Sequence[str], log: Path, limit: float) -> int | None:
        """Run `shardwise train`; see `Run`."""
        deadline = time.monotonic() + limit
        if self._forks:
            with log.open("wb") as file:
                try:
                    if self._server is None:
                        self._start(file.fileno())
                        self._forks = self._receive(deadline)["forks"]
                    if self._forks:
                        return self._fork(["train", *arguments], file.fileno(), deadline)
                except TimeoutError:
                    # Its next message would be about this run. The next run starts another server.
                    self._stop()
                    return None
                except (EOFError, ConnectionError):
                    assert self._server is not None
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._server.wait(1)
                    return self._stop()
            self._stop()
        return run_command([*TRAIN, *arguments], log, max(0.0, deadline - time.monotonic()))

    def _start(self, log: int) -> None:
        """Start the server. Until the first run begins, its output goes to the log of that run."""
        self._channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._server = subprocess.Popen(
                [*PRELOADED, str(server_end.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )

    def _stop(self) -> int:
        """End the server, if there is one.

        Return its exit code, which is its own where it has ended already.
        """
        if self._server is None or self._channel is None:
            return 0
        server, self._server = self._server, None
        _kill(server.pid)
        assert server.stdin is not None
        server.stdin.close()
        self._channel.close()
        return server.wait()

    def _fork(self, arguments: list[str], log: int, deadline: float) -> int:
        """Let the server run a command in a fork, wait for its end, and return its exit code.

        The run's process group lives until the pipe closes whose writing end this process keeps.
        """
        assert self._channel is not None
        reading_end, writing_end = os.pipe()
        group = None
        try:
            try:
                request = json.dumps({"arguments": arguments}).encode()
                socket.send_fds(self._channel, [request], [log, reading_end])
            finally:
                os.close(reading_end)
            group = self._receive(deadline)["group"]
            return self._receive(deadline)["code"]
        finally:
            if group is not None:
                _kill(group)
            os.close(writing_end)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """Return the server's next message.

        Raises TimeoutError, and EOFError where the server has ended.
        """
        assert self._channel is not None
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        message = self._channel.recv(LONGEST_MESSAGE)
        if not message:
            raise EOFError
        return json.loads(message)
