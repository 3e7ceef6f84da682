"""The end of a run that hangs: when nothing has moved for too long, every rank tells where it stands, and ends.

There is one watchdog in a process, as there is one main thread to watch; what makes progress says so with `beat`, and
what may take as long as disks and networks do stands in `paused`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TextIO

GRACE_SECONDS = 5.0
"""How much later a process ends whose Python threads do not run any more."""

_last_beat = [0.0]
_pauses: set[object] = set()


def beat() -> None:
    """Something was finished: a step, an evaluated batch, a checkpoint. The time starts anew."""
    _last_beat[0] = time.monotonic()


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Let the block take as long as it wants, in any thread: nobody knows what reading or writing files takes.

    Where it is this rank's own work, those that wait for it outside of such a block end the run if it takes too long.
    Where the block waits for others, their process group's own time-out ends it, without stacks.
    """
    this = object()
    _pauses.add(this)
    try:
        yield
    finally:
        beat()
        _pauses.remove(this)


@contextlib.contextmanager
def watch(seconds: float, stacks: Path, at_timeout: Callable[[], None]) -> Generator[None]:
    """End this process with exit code 1 once `seconds` have passed without a `beat`.

    Before that the stacks of all its threads are written to `stacks`, and `at_timeout` is called. It is done by a
    thread; where a call into C keeps all Python threads from running, the interpreter's own watchdog, which needs
    none, writes the stacks and ends the process. A process that is stopped (SIGSTOP) can do neither:
    the others name it by its missing stack.
    """
    over = threading.Event()

    def arm(file: TextIO) -> float:
        late = _last_beat[0] + seconds + GRACE_SECONDS - time.monotonic()
        faulthandler.dump_traceback_later(max(late, 0.1), exit=True, file=file)
        return _last_beat[0]

    def guard(file: TextIO, armed: float) -> None:
        while not over.wait(min(1.0, seconds / 10)):
            if _pauses:
                beat()
            if _last_beat[0] != armed:
                armed = arm(file)
            if time.monotonic() > armed + seconds:
                faulthandler.dump_traceback(file, all_threads=True)
                file.flush()
                at_timeout()
                os._exit(1)

    beat()
    with stacks.open("w", encoding="utf-8") as file:
        thread = threading.Thread(target=guard, name="watchdog", args=(file, arm(file)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            stacks.unlink(missing_ok=True)
