"""Starts runs, each in a process group of its own and with a time limit: no process of one outlives its call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

TRAIN = (sys.executable, "-m", "shardwise", "train")
PRELOADED = (sys.executable, "-m", "shardwise.launch.preloaded")
LEASH = 'exec 3<&0 </dev/null; ({ read _ <&3; kill -KILL 0; } >/dev/null 2>&1 &); exec "$@" 3<&-'
"""Becomes the command "$@", beside a process that ends its whole group as soon as standard input closes: which it does
when the bench dies, even of SIGKILL."""
LONGEST_MESSAGE = 2**16

Run = Callable[[Sequence[str], Path, float], int | None]
"""Runs `shardwise train` with these arguments, a log and a limit in seconds. Returns the exit code, or None where the
run was killed since it took longer."""


@contextlib.contextmanager
def runs(train: Sequence[str] | None) -> Generator[Run]:
    """Give what starts the runs of a bench: the command `train`, or forks of one process that has imported it all."""
    if train is None and sys.platform == "linux":
        with Preloaded() as preloaded:
            yield preloaded.run
    else:
        command = train or TRAIN
        yield lambda arguments, log, limit: run_command([*command, *arguments], log, limit)


def run_command(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Run a command; see `Run`."""
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
    with contextlib.suppress(ProcessLookupError):  # the leash keeps the group's number from being given again
        os.killpg(group, signal.SIGKILL)


class Preloaded:
    """Runs in forks of one `shardwise.launch.preloaded`, which is started with the first run.

    On a machine with a GPU each run is a new process of Python instead, since CUDA does not survive a fork.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._forks = True

    def __enter__(self) -> Preloaded:
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
                    self._stop()  # what it would still answer is about this run; the next one starts another server
                    return None
                except (EOFError, ConnectionError):
                    assert self._server is not None
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._server.wait(1)
                    return self._stop()
            self._stop()
        return run_command([*TRAIN, *arguments], log, max(0.0, deadline - time.monotonic()))

    def _start(self, log: int) -> None:
        # What goes wrong in it before the first run begins stands in that one's log.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [*PRELOADED, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _stop(self) -> int:
        """End the server, if there is one. Returns its exit code: its own if it had ended already."""
        if self._server is None or self._channel is None:
            return 0
        server, self._server = self._server, None
        _kill(server.pid)
        assert server.stdin is not None
        server.stdin.close()
        self._channel.close()
        return server.wait()

    def _fork(self, arguments: list[str], log: int, deadline: float) -> int:
        assert self._channel is not None
        lease, ours = os.pipe()
        group = None
        try:
            try:
                socket.send_fds(self._channel, [json.dumps({"arguments": arguments}).encode()], [log, lease])
            finally:
                os.close(lease)
            group = self._receive(deadline)["group"]
            return self._receive(deadline)["code"]
        finally:
            if group is not None:
                _kill(group)
            os.close(ours)

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message of the server. Raises TimeoutError, and EOFError where the server has ended."""
        assert self._channel is not None
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        message = self._channel.recv(LONGEST_MESSAGE)
        if not message:
            raise EOFError
        return json.loads(message)
