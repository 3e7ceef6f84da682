"""SIGTERM, SIGUSR1 and Ctrl-C as requests to stop, on which all ranks agree."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

# torch is imported inside functions: a launcher handles signals before it imports torch.
if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""The signals that ask a run to finish its step, save and end. A scheduler sends SIGUSR1 when the
time is nearly up, if it is asked to; SIGTERM also when somebody cancels the job."""


_asked: list[int] = []
_reactions: list[Callable[[int], object]] = []


def ask(number: int) -> None:
    """Ask the run of this process to stop as a signal does, also a run that begins later.

    For a launcher that runs a rank in a thread, where no signal arrives.
    """
    _asked.append(number)
    for react in list(_reactions):
        react(number)


@contextlib.contextmanager
def on_signals(react: Callable[[int], object]) -> Generator[None]:
    """Let the SIGNALS that arrive in the block call `react` with their number, and nothing else.

    Outside of the main thread, where Python sets no handlers, they keep their effect. What `ask` is
    given does the same.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        react(number)

    _reactions.append(react)  # before the look at what was asked, so that nothing is missed
    for number in _asked:
        react(number)
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _reactions.remove(react)


def agreed_signal(numbers: Sequence[int], mesh: Mesh) -> int:
    """Return a signal that a rank has received, 0 if none has; the same on every rank.

    So all ranks can stop after the same step. `numbers` are this rank's signals, in their order.
    """
    import torch
    import torch.distributed as dist

    number = torch.tensor(numbers[0] if numbers else 0, device=mesh.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(number, op=dist.ReduceOp.MAX)  # 8 bytes of every rank, to all
    return int(number)
