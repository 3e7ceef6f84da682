"""A group of processes on this machine: how they start, how they are asked to end, and which ending was the first."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from shardwise.process.ending import FAILED, SIGNALS, Ending
from shardwise.process.world import threads_each

# torch is imported inside functions: the user's mistakes are told before that takes its seconds.

INTERRUPTED = Ending(FAILED, "interrupted by a signal", "", "stopped")
"""Ctrl-C or a request to end, from the terminal or a scheduler, while there was no step to finish."""
GRACE_SECONDS = 10.0
"""How long the other processes may go on after one has failed: after a time-out each prints its stacks."""


class Requests:
    """The signals that have asked this process to end, between `__enter__` and `__exit__`.

    The first is handed on to the processes of the group, which finish their step and save; the
    second ends them at once. While there is no group, the first ends this process. Outside the main
    thread, where Python sets no handlers, signals do what they did.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.group: Sequence[BaseProcess] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        if self.group is None:
            sys.exit(128 + number)
        self.hand_on()

    def hand_on(self) -> None:
        """Ask the processes of the group to end, as far as this process was asked."""
        for process in self.group or ():
            if len(self.numbers) == 1:
                process.terminate()
            elif self.numbers:
                process.kill()


def can_fork(device_type: str, torch_was_imported: bool) -> bool:
    """Whether new processes may be copies of this one, which then share what it has imported.

    A fork copies one thread, and no locks that others hold. So not after CUDA has started or is about to, not on macOS,
    whose own libraries do not survive it, and not from a program that has threads: Python's, or a pool of torch's.
    """
    import torch

    num_torch_threads = torch.get_num_threads() if torch_was_imported else 1
    one_thread = threading.active_count() == 1 and num_torch_threads == 1
    return (
        sys.platform == "linux"
        and device_type == "cpu"
        and one_thread
        and not torch.cuda.is_initialized()
    )


def run_group(
    main: Callable[[int, str], None], num_processes: int, method: str, requests: Requests
) -> Ending | None:
    """Run `main(rank, folder)` in so many new processes, from start to end; None if all went well.

    `method`: fork or spawn. `folder` is a new one that only this user may read; the processes meet in a file there, so
    that nothing listens on a port, and leave their endings in it. See `start_in_group` for what `main` begins with.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        requests.group = []
        try:
            requests.group = group = _start(main, num_processes, method, folder)
            requests.hand_on()  # what came while they were started
            failed = _first_failure(group, folder)
        finally:
            _end(requests.group)
            requests.group = None
        rank = 0 if failed is None else failed
        report = _report_path(folder, rank)
        if report.exists():
            return Ending(**json.loads(report.read_text(encoding="utf-8")))
        if failed is None:
            return None
        if requests.numbers:
            return replace(INTERRUPTED, exit_code=128 + requests.numbers[0])
        reason = f"rank {rank} of {num_processes} {_how_it_died(group[rank].exitcode or 0)}"
        return Ending(FAILED, reason, f"error: {reason}")


def start_in_group() -> None:
    """Take signals as a new process does. They were held back from its first moment on.

    The other ranks are asked to end by the launcher, and Ctrl-C goes to all of a terminal: without a word, where Python
    would print what it was importing. The same signal comes when the launcher dies.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def report(folder: str, rank: int, ending: Ending) -> None:
    """Leave word for the launcher of how this process ends."""
    unfinished = Path(folder, f"rank-{rank}.tmp")
    unfinished.write_text(json.dumps(asdict(ending)), encoding="utf-8")
    unfinished.rename(_report_path(folder, rank))


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def _start(
    main: Callable[[int, str], None], num_processes: int, method: str, folder: str
) -> list[BaseProcess]:
    from torch import (
        multiprocessing,
    )  # torch's, since its processes get SIGINT when their parent dies (on Linux)

    assert method == "spawn" or threading.active_count() == 1, (
        "a thread was started since `can_fork`"
    )
    if method == "spawn":
        resource_tracker.ensure_running()  # multiprocessing's helper; started later, it would unblock SIGINT
    # SIGTERM has to end a spawned process while it imports. A forked one has this one's handlers at first.
    blocked = [signal.SIGINT] if method == "spawn" else SIGNALS
    mask, others = (
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked),
        multiprocessing.active_children(),
    )
    try:
        with _threads_of_each(num_processes):
            context = multiprocessing.start_processes(
                main, (folder,), num_processes, join=False, start_method=method
            )
    except (
        BaseException
    ):  # such as a limit on processes: those that were started would wait for the rest
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context.processes


@contextlib.contextmanager
def _threads_of_each(num_processes: int) -> Generator[None]:
    """Let new processes have their share of the cores; libraries read it when they are loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads_each(num_processes))
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _first_failure(group: Sequence[BaseProcess], folder: str) -> int | None:
    """Wait until all have ended well, or one has not: its rank."""
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(group)}
    while running:
        ended = [
            running.pop(sentinel) for sentinel in multiprocessing.connection.wait(list(running))
        ]
        for rank in ended:
            group[rank].join()
        if failed := [rank for rank in ended if group[rank].exitcode != 0]:
            # Where this process was slow to look: one that was killed has left no word, and others fail of it.
            return min(failed, key=lambda rank: _when_reported(folder, rank))
    return None


def _when_reported(folder: str, rank: int) -> float:
    path = _report_path(folder, rank)
    return path.stat().st_mtime if path.exists() else 0.0


def _end(group: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for process in group:
        process.terminate()
    for process in group:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} without a word"
    hint = "; the system does that when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"
