"""Seconds of work on a device, what the device can do, and the least a LoRA linear can take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tools.paired import spread

from tests.gpu.shapes import Setting

METHOD = {
    "cuda": "Each time is the median over repeats of what CUDA events around the work say. Before "
    "each repeat 256 MiB are written, so that nothing of its operands is left in the L2 cache, and "
    "the device then idles for 2 ms or twice what the host takes to queue the work: device time "
    "alone, no gaps for launches. `host` is what queueing took.",
    "cpu": "Each time is the median over repeats by the wall clock.",
}
FLUSH_BYTES = 256 * 2**20
CYCLES_PER_SECOND = 2_000_000_000  # of the device's clock, about


class Clock:
    """Times work on a device; on a CPU by the wall clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        num_bytes = FLUSH_BYTES if device.type == "cuda" else 0
        self.flush = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def time(
        self, work: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None
    ) -> dict[str, Any]:
        """Return the seconds of `work(prepare())`, where preparing is not timed.

        Two runs come first, which may compile.
        """
        first, second = (self._once(work, prepare) for _ in range(2))
        pause = max(0.002, 2 * min(first[1], second[1]))
        runs = [self._once(work, prepare, pause) for _ in range(self.repeats)]
        seconds, host_seconds = zip(*runs)
        return {**spread(seconds), "host": statistics.median(host_seconds)}

    def _once(
        self, work: Callable[[Any], Any], prepare: Callable[[], Any], pause: float = 0.002
    ) -> tuple[float, float]:
        ready = prepare()
        if self.device.type != "cuda":
            start = time.perf_counter()
            work(ready)
            return (time.perf_counter() - start,) * 2
        self.flush.zero_()
        torch.cuda._sleep(int(pause * CYCLES_PER_SECOND))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        start = time.perf_counter()
        work(ready)
        host = time.perf_counter() - start
        events[1].record()
        torch.cuda.synchronize(self.device)
        return events[0].elapsed_time(events[1]) / 1e3, host


def ceilings(clock: Clock) -> dict[str, float]:
    """Return the bytes/s of a copy, read and written, and FLOP/s of a product of random data."""
    device = clock.device
    size, numbers = (8192, 2**29) if device.type == "cuda" else (256, 2**20)
    source = torch.randn(numbers, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copied = clock.time(lambda _: target.copy_(source))["median"]
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    multiplied = clock.time(lambda _: a @ b)["median"]
    return {
        "bytes_per_second": 2 * source.nbytes / copied,
        "flops_per_second": 2 * size**3 / multiplied,
    }


def floors(setting: Setting, tokens: int, device: dict[str, float]) -> dict[str, float]:
    """Return the least seconds of forward and backward: by FLOPs, or by bytes moved once each.

    bfloat16. Forward: reads x, the weights and factors, writes the outputs. Backward: reads the
    outputs' gradients, the weights, the factors and x, writes the gradients of x and of the
    factors; no gradient of the weights.
    """
    k, r, total = setting.k, setting.r, sum(setting.n)
    factors = len(setting.n) * r * k + r * total
    flops = {
        "forward": 2 * tokens * (k * total + factors),
        "backward": 2 * tokens * (k * total + 2 * factors),
    }
    moved = 2 * (tokens * (k + total) + k * total + factors)
    numbers = {"forward": moved, "backward": moved + 2 * (tokens * k + factors)}
    return {
        way: max(flops[way] / device["flops_per_second"], numbers[way] / device["bytes_per_second"])
        for way in flops
    }
