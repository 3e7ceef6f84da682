"""The seconds that functions take on a device, and those in which the host queues their work.

On a CPU both are the same. A GPU works on while the host goes on, so a step takes as long as the
slower of the two, and each is measured by itself: the host until everything is queued, and the GPU
while other work holds it back until everything is queued, so that it never waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import ceil
from typing import Any, Literal

import torch

ROUNDS = 5
HELD_BYTES = 2**28


class Stopwatch:
    """Takes the time of what runs on one device.

    `of`: the seconds of `device` or of `host`, or those until a device that was idle has done what
    the host gave it (`both`).
    """

    def __init__(
        self, device: torch.device, of: Literal["both", "device", "host"] = "both"
    ) -> None:
        self.device, self.of = device, of
        self.is_gpu = device.type == "cuda"
        self.held_seconds = 0.001
        """How long a GPU is held back: longer than the host takes to queue the work."""
        if self.is_gpu and of == "device":
            self._held = torch.empty(HELD_BYTES, dtype=torch.uint8, device=device)
            self._seconds_each = 0.0
            held: list[float] = []
            for _ in range(ROUNDS):
                with self.taking(held):
                    self._held.zero_()
            self._seconds_each = statistics.median(held)

    @contextmanager
    def taking(self, into: list[float]) -> Generator[None]:
        """Append the seconds of what runs within to a list."""
        self.wait()
        if self.is_gpu and self.of == "device":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._hold()
            start.record()
            yield
            end.record()
            end.synchronize()
            into.append(start.elapsed_time(end) / 1e3)
            return
        began = time.perf_counter()
        yield
        if self.of != "host":
            self.wait()
        into.append(time.perf_counter() - began)

    def median_seconds(self, work: Callable[[], Any], rounds: int = ROUNDS) -> float:
        """Return the median seconds of a function, which runs once before."""
        work()
        seconds: list[float] = []
        for _ in range(rounds):
            with self.taking(seconds):
                work()
        return statistics.median(seconds)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _hold(self) -> None:
        """Give the device other work, which empties its caches, too."""
        if self._seconds_each:
            for _ in range(ceil(self.held_seconds / self._seconds_each)):
                self._held.zero_()
