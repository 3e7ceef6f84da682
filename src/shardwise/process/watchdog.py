"""The end of a run that hangs: when nothing has moved for too long, every rank tells where it stands, and ends.

There is one watchdog in a process. It watches the main thread, and another while that is in `watched`; each has a time
of its own. What makes progress says so with `beat`, and what may take as long as disks and networks do stands in
`paused`.
"""

from __future__ import annotations

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

from shardwise.process.ending import RunError

GRACE_SECONDS = 5.0
"""How much later a process ends whose Python threads do not run any more."""
TELL_SECONDS = 120.0
"""How long `at_timeout` may take, on a busy machine and slow disks, before the process ends all the same."""


@dataclass
class _Clock:
    """The time of one thread."""

    last_beat: float
    num_pauses: int = 0


_clocks: dict[int, _Clock] = {}
"""By thread; a thread that nobody watches has none."""


def beat() -> None:
    """Something was finished: a step, an evaluated batch, a checkpoint. The time of this thread starts again at 0."""
    if (clock := _clocks.get(threading.get_ident())) is not None:
        clock.last_beat = time.monotonic()


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Let the block take as long as this thread wants: nobody knows what reading or writing files takes.

    Those that wait for it outside of such a block end the run if it takes too long. So where ranks wait for each other
    does not belong into one: there only their process group's own time-out would end it, without stacks.
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
    """End this process with exit code 1 once a watched thread, as this one is, has been without `beat` for `seconds`.

    Before that the stacks of all its threads are written to `stacks`, and `at_timeout` is called. It is done by a
    thread; where a call into C keeps all Python threads from running, or `at_timeout` does not end, the interpreter's
    own watchdog, which needs none, writes the stacks and ends the process. A process that is stopped (SIGSTOP) can do
    neither: the others name it by its missing stack.
    """
    over = threading.Event()

    def oldest() -> float:
        clocks = list(_clocks.values())
        for clock in clocks:
            if clock.num_pauses:
                clock.last_beat = time.monotonic()
        return min(clock.last_beat for clock in clocks)

    def arm(file: TextIO) -> float:
        armed = oldest()
        late = armed + seconds + GRACE_SECONDS - time.monotonic()
        faulthandler.dump_traceback_later(max(late, 0.1), exit=True, file=file)
        return armed

    def guard(file: TextIO, armed: float) -> None:
        while not over.wait(min(1.0, seconds / 10)):
            if oldest() != armed:
                armed = arm(file)
            if time.monotonic() > armed + seconds:
                faulthandler.dump_traceback_later(TELL_SECONDS, exit=True, file=file)
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                try:
                    at_timeout()
                except BaseException:  # such as a folder that is gone; the end comes all the same
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
            stacks.unlink(missing_ok=True)
