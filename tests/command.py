"""Run `shardwise ...` in a forked process, which need not import what this one has imported.

Beside a new interpreter it differs in nothing that a test here looks at: streams are files,
warnings and logging are as Python starts with, signals have their usual handlers. What is said of
the start itself needs a real command.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed import PATIENCE

_IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""By Python, where nothing is asked of it."""


def run_command(
    arguments: Sequence[str],
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    patience: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """What `shardwise ARGUMENTS` prints and returns; its process has `env`, and calls `before` and
    `after`. TimeoutError if it does not end in `patience` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_main, args=(arguments, env or {}, before, after, streams))
        process.start()
        process.join(patience)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"shardwise {' '.join(arguments)} did not end in {patience} seconds")
        assert process.exitcode is not None
        out, err = (Path(stream).read_text(encoding="utf-8") for stream in streams)
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _main(
    arguments: Sequence[str],
    env: dict[str, str],
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    streams: Sequence[str],
) -> None:
    from shardwise.commands.cli import main

    _become_a_command(env, [os.open(stream, os.O_WRONLY | os.O_CREAT) for stream in streams])
    sys.argv = ["shardwise", *arguments]
    if before is not None:
        before()
    code = main(arguments)
    if after is not None:
        after()
    _exit(code)


class Forked:
    """A process in a session of its own that calls a function and exits with what it returns.

    It is waited for as a subprocess.Popen with pipes.
    """

    def __init__(self, call: Callable[[], int], env: dict[str, str]) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_call, args=(call, env, (out_end, err_end)))
        self._process.start()
        os.close(out_end)
        os.close(err_end)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._printed = {out: b"", err: b""}
        self._open = [out, err]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Return what it has printed, once nobody holds its streams; TimeoutError after so long."""
        end = time.monotonic() + timeout
        while self._open:
            ready, _, _ = select.select(self._open, [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"its streams are open after {timeout} seconds")
            for stream in ready:
                chunk = os.read(stream, 65536)
                self._printed[stream] += chunk
                if not chunk:
                    self._open.remove(stream)
                    os.close(stream)
        self._process.join(timeout)
        out, err = (text.decode() for text in self._printed.values())
        return out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _call(call: Callable[[], int], env: dict[str, str], streams: Sequence[int]) -> None:
    os.setsid()
    _become_a_command(env, streams)
    _exit(call())


def _become_a_command(env: dict[str, str], streams: Sequence[int]) -> None:
    """Take the environment, the streams and the handlers of signals of a command from a shell."""
    os.environ.update(env)
    tempfile.tempdir = None  # that of the environment
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Those of pytest write into what it captures.
    sys.stdin, sys.stdout, sys.stderr = (
        sys.__stdin__,
        *(os.fdopen(number, "w", buffering=1) for number in (1, 2)),
    )
    gc.freeze()  # what was inherited, such as process groups, is not this process's to collect
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for category in _IGNORED:
        warnings.simplefilter("ignore", category)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
