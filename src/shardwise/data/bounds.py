"""Bounds on the time and memory of a call into code that comes with a model, such as a chat template."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType

from shardwise.config import UserError

CPU_SECONDS = 5.0
"""Hundreds of times what any chat template takes. CPU time, so that a busy machine refuses none."""
MEMORY_BYTES = 1 << 30


class _TookTooLong(BaseException):
    """Not an Exception, which Jinja would take for a mistake in an expression and try again."""


@contextlib.contextmanager
def bounded(what: str) -> Generator[None]:
    """Raise UserError, which names `what`, where the body takes more than CPU_SECONDS or MEMORY_BYTES.

    The bounds are the process's, so call it while other threads are idle. Outside of the main thread, which alone gets
    signals, there is none on the time; where there is no /proc, none on the memory.
    """
    try:
        with _less_memory(), _less_time():
            yield
    except _TookTooLong:
        raise UserError(f"{what} takes more than {CPU_SECONDS:g} s for one row; mend it, or use another") from None
    except MemoryError:
        size = f"{MEMORY_BYTES / 2**30:g} GiB"
        raise UserError(f"{what} takes more than {size} for one row; mend it, or use another") from None


@contextlib.contextmanager
def _less_memory() -> Generator[None]:
    pages = Path("/proc/self/statm")
    if not pages.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _less_time() -> Generator[None]:
    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise _TookTooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
