"""Limits on the time and memory of foreign code, such as the chat template of a model."""

import contextlib
import resource
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType

from shardwise.config import UserError

CPU_SECONDS = 5.0
"""Hundreds of times what a chat template takes. CPU time, so that no busy machine refuses one."""
LATER_CPU_SECONDS = 60.0
"""The same while a run trains: all threads of the process count."""
MEMORY_BYTES = 1 << 30


class TimeLimit(BaseException):
    """The time is up. Not an Exception, which Jinja would treat as an error of an expression."""

    def __init__(self, cpu_seconds: float) -> None:
        super().__init__()
        self.cpu_seconds = cpu_seconds


@contextlib.contextmanager
def bounded(name: str) -> Generator[None]:
    """Run the body within CPU_SECONDS and MEMORY_BYTES; UserError with `name` where it takes more.

    The limits hold for the whole process, so call it while other threads are idle. The time has a
    limit only in the main thread, which alone gets signals, and memory only where there is a /proc.
    """
    advice = "for one row; change it, or use another one"
    try:
        with _memory_limit(), time_limit(CPU_SECONDS):
            yield
    except TimeLimit:
        raise UserError(f"{name} takes more than {CPU_SECONDS:g} s {advice}") from None
    except MemoryError:
        size = f"{MEMORY_BYTES / 2**30:g} GiB"
        raise UserError(f"{name} takes more than {size} {advice}") from None


@contextlib.contextmanager
def _memory_limit() -> Generator[None]:
    """Limit the address space to MEMORY_BYTES more than the process has now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def time_limit(cpu_seconds: float) -> Generator[None]:
    """Raise TimeLimit in the body after so much CPU time of the process, or as an outer limit says.

    Only the main thread gets signals, so elsewhere there is no limit.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimit(cpu_seconds)

    has_limit = signal.getitimer(signal.ITIMER_PROF)[0] > 0
    if has_limit or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
