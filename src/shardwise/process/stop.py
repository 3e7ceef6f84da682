"""A request to stop, by SIGTERM or Ctrl-C: the step in hand is finished, a checkpoint is written, and the run ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.interfaces import Mesh
from shardwise.process.ending import SIGNALS


class StopRequest:
    """Holds signals back between `__enter__` and `__exit__`; what came is asked for by `agreed`.

    A second signal is held back too: whoever started the process ends it the hard way with SIGKILL. Outside the main
    thread, where Python sets no handlers, signals do what they did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
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
        self.number = self.number or number

    def agreed(self, mesh: Mesh) -> int:
        """The signal that any rank has got, 0 if none has: equal on every rank, so that all stop after the same step.

        An all-reduce of one number. A rank that was told stops the others, whether they were told or not.
        """
        number = torch.tensor(self.number, device=mesh.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)
