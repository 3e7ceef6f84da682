"""The end of a run that hangs: every rank writes where it stands, and its process ends.

A process has one watchdog. It watches the main thread, and another thread while that is in
`watched`; each thread has a clock of its own. `beat` reports progress, and `paused` stops the clock
while a thread does what may take as long as disks and networks do.
"""

import contextlib
import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shardwise.base.process.ending import RunError

GRACE_SECONDS = 5.0
"""How much later a process ends whose Python threads have stopped running."""
REPORT_SECONDS = 120.0
"""How long `at_timeout` may take, on a busy machine and slow disks, before the process ends."""


@dataclass
class _Clock:
    """The clock of one thread."""

    last_beat: float
    num_pauses: int = 0


_clocks: dict[int, _Clock] = {}
"""The clock of each watched thread, by the id of the thread."""


def beat() -> None:
    """Report that something is finished (a step, an evaluated batch, a checkpoint).

    The clock of this thread starts again at 0.
    """
    if (clock := _clocks.get(threading.get_ident())) is not None:
        clock.last_beat = time.monotonic()


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Stop this thread's clock in the block, which reads or writes files.

    Ranks that wait for this one outside of such a block end the run if it takes too long. So a
    wait for other ranks does not belong into the block: only their process group's own time-out
    would end it, without stacks.
    """
    clock = _clocks.get(threading.get_ident()) or _Clock(0.0)
    clock.num_pauses += 1
    try:
        yield
    finally:
        beat()
        clock.num_pauses -= 1


@contextlib.contextmanager
def watched() -> Generator[None]:
    """Watch this thread, too, while it is in the block."""
    this = threading.get_ident()
    _clocks[this] = _Clock(time.monotonic())
    try:
        yield
    finally:
        del _clocks[this]


@contextlib.contextmanager
def watch(seconds: float, stacks: Path, at_timeout: Callable[[], None]) -> Generator[None]:
    """End this process with exit code 1 once a watched thread has had no `beat` for `seconds`.

    This thread is watched in the block. A guard, which is a thread, first writes the stacks of
    all threads to `stacks` and calls `at_timeout`. Where a call into C keeps Python's threads from
    running, or `at_timeout` does not return, the interpreter's own watchdog (faulthandler), which
    needs no Python thread, writes the stacks and ends the process. A process that is stopped
    (SIGSTOP) can do neither: its missing stacks name it.
    """
    over = threading.Event()

    def oldest_beat() -> float:
        clocks = list(_clocks.values())
        for clock in clocks:
            if clock.num_pauses:
                clock.last_beat = time.monotonic()
        return min(clock.last_beat for clock in clocks)

    def end_after(late: float, file: TextIO) -> None:
        # It starts a thread, for which there may be no memory now: the guard looks on without it.
        with contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback_later(late, exit=True, file=file)

    def arm(file: TextIO) -> float:
        """Set the interpreter's watchdog to a little after the guard; return the oldest beat."""
        armed = oldest_beat()
        late = armed + seconds + GRACE_SECONDS - time.monotonic()
        end_after(max(late, 0.1), file)
        return armed

    def guard(file: TextIO, armed: float) -> None:
        while not over.wait(min(1.0, seconds / 10)):
            if oldest_beat() != armed:
                armed = arm(file)
            if time.monotonic() > armed + seconds:
                end_after(REPORT_SECONDS, file)
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                try:
                    at_timeout()
                except BaseException:  # such as a folder that is gone; the process ends anyway
                    traceback.print_exc()
                os._exit(1)

    try:
        file = stacks.open("w", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{stacks.parent}: cannot write there ({reason}); was the output folder removed?"
        ) from None
    with watched(), file:
        thread = threading.Thread(
            target=guard, name="watchdog", args=(file, arm(file)), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):  # the disk may be what the run ends of
                stacks.unlink()
