"""The ranks of a run as processes of this machine: start them, watch them, find the first cause
of a failure, end them.
"""

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
from typing import Any

from shardwise.base.process.ending import FAILED, INTERRUPTED, Ending, explain, nothing_to_save
from shardwise.base.process.stop import SIGNALS
from shardwise.base.process.world import threads_each, variables
from shardwise.base.safety import write_atomically

# torch is imported inside functions: a user's mistake is reported before that takes its seconds.

GRACE_SECONDS = 10.0
"""How long the other ranks may take to end after one has failed.

After a time-out, each of them prints its stacks first.
"""


class Group:
    """The ranks of a run, as processes that this one starts, and its reaction to signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        """The signals that have asked this process to end, in their order."""
        self._processes: Sequence[BaseProcess] = ()
        self._has_started = False

    def on_signal(self, number: int) -> None:
        """Note a signal, and pass it on to the ranks, if they run.

        An exception could leave torch half imported, and who imports that again dies. So before the
        ranks are started only a second signal ends this process at once.
        """
        self.signals.append(number)
        if len(self.signals) > 1 and not self._has_started:
            sys.exit(128 + self.signals[0])
        self._pass_on()

    def check_signals(self) -> None:
        """End as the first signal asks; for the time before `run`, in which they are noted."""
        if signal.SIGUSR1 in self.signals[:1]:
            raise nothing_to_save(signal.SIGUSR1)
        if self.signals:
            sys.exit(128 + self.signals[0])

    def _pass_on(self) -> None:
        """Ask the ranks to finish their step and save; after a second signal, kill them.

        They get the signal that this process has got, whose number their exit code tells.
        """
        numbers = self.signals[:1]
        if numbers == [signal.SIGINT]:  # which a spawned process that still imports has blocked
            numbers = [signal.SIGINT, signal.SIGTERM]
        for process in self._processes:
            if len(self.signals) > 1:
                process.kill()
            elif process.exitcode is None and process.pid is not None:
                for number in numbers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)

    def run(
        self, main: Callable[[int, str], None], num_processes: int, method: str
    ) -> Ending | None:
        """Run `main(rank, folder)` in new processes from start to end; None if all succeeded.

        `method` is fork or spawn. `folder` is new and readable by this user only. The ranks meet
        in a file there, so that nothing listens on a port, and leave their endings there (see
        `leave_ending`). `main` begins with `take_signals`.
        """
        from torch import multiprocessing  # its processes get SIGINT when this one dies (on Linux)

        others = multiprocessing.active_children()
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            self._has_started = True
            try:
                # Libraries read their number of threads when they are loaded.
                cores = {"OMP_NUM_THREADS": str(threads_each(num_processes))}
                with _signals_blocked(method), variables(cores):
                    context = multiprocessing.start_processes(
                        _run, (main, folder), num_processes, join=False, start_method=method
                    )
                self._processes = context.processes
                self._pass_on()  # signals that came while the ranks were started
                rank = _first_failure(self._processes, folder)
            except BaseException:
                if not self._processes:  # not all could start, and those that did wait for the rest
                    started = multiprocessing.active_children()
                    self._processes = [process for process in started if process not in others]
                raise
            finally:
                _end(self._processes)
                exit_codes = [process.exitcode for process in self._processes]
                self._processes = ()
            ending = _read_ending(folder, 0 if rank is None else rank)
            if ending is not None or rank is None:
                return ending
            if exit_codes[rank] == -signal.SIGUSR1:  # which a run would have noted
                return explain(nothing_to_save(signal.SIGUSR1))
            if self.signals:
                return replace(INTERRUPTED, exit_code=128 + self.signals[0])
            reason = f"rank {rank} of {num_processes} {_how_it_died(exit_codes[rank] or 0)}"
            return Ending(FAILED, reason, f"error: {reason}")


def can_fork(device_type: str, torch_was_imported: bool) -> bool:
    """Return whether new processes may be forks of this one, which share what it has imported.

    A fork has one thread, and the locks that other threads held stay locked in it. So a process
    that has other threads, Python's or a pool of torch's, may not fork. Nor may one that uses
    CUDA, or any on macOS, whose libraries do not survive it.
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


def take_signals() -> None:
    """Let signals end this process, a new rank, without a word; they were blocked until now.

    Ctrl-C reaches all processes of a terminal, and Python would print what it was importing. The
    launcher's end sends the same signal.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def _signals_blocked(method: str) -> Generator[None]:
    """Start processes in this block with blocked signals, until they call `take_signals`."""
    # A fork begins with the handlers of this process. A spawned process has none, and SIGTERM must
    # be able to end it while it imports; but SIGINT would print a traceback of the imports.
    signals = SIGNALS if method == "fork" else (signal.SIGINT,)
    if method == "fork":
        assert threading.active_count() == 1, "a thread was started since `can_fork`"
    else:
        # multiprocessing's helper; if it started in the block, it would unblock SIGINT.
        resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(rank: int, main: Callable[[int, str], None], folder: str) -> None:
    """Be one rank: a process that ends before `main` returns has failed, whatever its exit code."""
    main(rank, folder)
    _path_of_return(folder, rank).touch()


def _first_failure(processes: Sequence[BaseProcess], folder: str) -> int | None:
    """Wait until all ranks have succeeded (None), or some have failed: the first of these."""
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        sentinels = multiprocessing.connection.wait(list(running))
        ended = [running.pop(sentinel) for sentinel in sentinels]
        for rank in ended:
            processes[rank].join()
        if failed := [
            rank
            for rank in ended
            if processes[rank].exitcode != 0 or not _path_of_return(folder, rank).exists()
        ]:
            # Several may have ended since the last look. One that was killed has left no ending,
            # and it is the cause of what others report.
            return min(failed, key=lambda rank: _seconds_of_ending(folder, rank))
    return None


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ask processes to end, and kill those that take longer than GRACE_SECONDS."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def leave_ending(folder: str, rank: int, ending: Ending) -> None:
    """Leave a file for the launcher that says how this rank ends."""
    try:
        # The same clock in every process, and nobody sets it.
        content = {"seconds": time.monotonic(), "ending": asdict(ending)}
        write_atomically(_path_of_ending(folder, rank), json.dumps(content))
    except OSError:  # no room there either
        print(ending.text, file=sys.stderr, flush=True)


def _read_ending(folder: str, rank: int) -> Ending | None:
    content = _left(folder, rank)
    return Ending(**content["ending"]) if content else None


def _seconds_of_ending(folder: str, rank: int) -> float:
    content = _left(folder, rank)
    return content["seconds"] if content else 0.0


def _left(folder: str, rank: int) -> dict[str, Any] | None:
    path = _path_of_ending(folder, rank)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _path_of_ending(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def _path_of_return(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.returned")


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and without a message"
    hint = "; the system does that when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"
