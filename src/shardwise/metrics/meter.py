"""Time per step and tokens per second, with the warm-up left out of every figure."""

from __future__ import annotations

import statistics
import time

import torch


class Meter:
    """Times steps: `start()` before, `stop(tokens)` after; on CUDA both wait for the device first."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.seconds: list[float] = []  # of every step, warm-up included
        self.tokens: list[int] = []
        self._start: float | None = None

    def start(self) -> None:
        """A step begins."""
        _wait_for_device()
        self._start = time.perf_counter()

    def stop(self, tokens: int) -> None:
        """A step of `tokens` target tokens over all ranks has ended."""
        assert self._start is not None, "stop() without start()"
        _wait_for_device()
        self.seconds.append(time.perf_counter() - self._start)
        self._start = None
        self.tokens.append(tokens)

    def tokens_per_second(self) -> float | None:
        """Tokens over seconds of the timed steps together; None before the first."""
        seconds = sum(self.seconds[self.warmup_steps :])
        return sum(self.tokens[self.warmup_steps :]) / seconds if seconds else None

    def step_seconds(self) -> dict[str, float] | None:
        """Mean, percentiles and maximum of the timed steps, and their number; None if none was timed."""
        timed = self.seconds[self.warmup_steps :]
        if not timed:
            return None
        # Inclusive: of one value every percentile is that value.
        cuts = statistics.quantiles(timed, n=10, method="inclusive") if len(timed) > 1 else timed * 9
        return {
            "mean": statistics.fmean(timed),
            "p10": cuts[0],
            "p50": statistics.median(timed),
            "p90": cuts[8],
            "max": max(timed),
            "steps": len(timed),
        }


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
