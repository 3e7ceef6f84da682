"""The seconds that functions take on a device, and those in which the host queues their work.

On a CPU both are the same. A GPU works on while the host goes on, so a step takes as long as the
slower of the two, and each is measured by itself: the host until everything is queued, and the GPU
while other work holds it back until everything is queued, so that it never waits for the host.
"""

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import ceil
from typing import Any, Literal

import torch

ROUNDS = 5
HELD_SIZE = 4096
"""Rows and columns of the products that hold a GPU back. They empty its caches, as other layers do
in a step, and keep it as hot."""
MOST_SECONDS = 0.2
"""A GPU is held back for so long at most: longer than a host needs for a layer."""


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
        self.is_held = self.is_gpu and of == "device"
        self.held_seconds = 0.001
        """How long a GPU is held back. It grows where the host needed longer."""
        if self.is_held:
            shape = 3, HELD_SIZE, HELD_SIZE
            self._a, self._b, self._out = torch.randn(shape, device=device, dtype=torch.bfloat16)
            self._seconds_each = Stopwatch(device).median_seconds(self._multiply)

    @contextmanager
    def taking(self, into: list[float]) -> Generator[None]:
        """Append the seconds of what runs within to a list.

        Nothing is appended if a GPU was free before the host had queued all, unless it was held
        back for MOST_SECONDS: no layer needs as long.
        """
        self.wait()
        if self.is_held:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(ceil(self.held_seconds / self._seconds_each)):
                self._multiply()
            start.record()
            yield
            was_free = start.query()
            end.record()
            end.synchronize()
            if was_free and self.held_seconds < MOST_SECONDS:
                self.held_seconds *= 2
            else:
                into.append(start.elapsed_time(end) / 1e3)
            return
        began = time.perf_counter()
        yield
        if self.of != "host":
            self.wait()
        into.append(time.perf_counter() - began)

    def median_seconds(self, work: Callable[[], Any], rounds: int = ROUNDS) -> float:
        """Return the median seconds of a function, which runs once before.

        What it returns lives until it has run once more.
        """
        work()
        seconds: list[float] = []
        while len(seconds) < rounds:
            with self.taking(seconds):
                _ = work()
        return statistics.median(seconds)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._out)
