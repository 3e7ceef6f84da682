"""Time per step and tokens per second, without the warm-up, and the time to the first step."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping

import torch


class Meter:
    """Measures the time of steps: call `start()` before a step and `stop(tokens)` after it.

    On CUDA both wait for the device first. Make a meter when a run begins: `first_step_seconds`
    count from then.
    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.seconds: list[float] = []  # every step's, also those of the warm-up
        self.first_step_seconds: float | None = None
        """From this moment to the end of the first step; None before that."""
        self.positions = Counter[int]()
        """The positions of this rank's rows in the timed steps, by the length of the row."""
        self._timed_seconds, self._timed_tokens = 0.0, 0
        self._made = time.perf_counter()
        self._start: float | None = None

    def start(self) -> None:
        """Begin a step."""
        _wait_for_device()
        self._start = time.perf_counter()

    def stop(self, tokens: int, positions: Mapping[int, int] | None = None) -> None:
        """End a step of `tokens` target tokens over all ranks, and of so many positions here."""
        assert self._start is not None, "stop() without start()"
        _wait_for_device()
        now = time.perf_counter()
        if not self.seconds:
            self.first_step_seconds = now - self._made
        self.seconds.append(now - self._start)
        self._start = None
        if len(self.seconds) > self.warmup_steps:
            self._timed_seconds += self.seconds[-1]
            self._timed_tokens += tokens
            self.positions.update(positions or {})

    def tokens_per_second(self) -> float | None:
        """Return all tokens over all seconds of the timed steps, or None before the first one."""
        return self._timed_tokens / self._timed_seconds if self._timed_seconds else None

    def step_seconds(self) -> dict[str, float] | None:
        """Return mean, percentiles, maximum and number of the timed steps, or None without any."""
        timed = self.seconds[self.warmup_steps :]
        if not timed:
            return None
        deciles = timed * 9  # of one value, every percentile is that value
        if len(timed) > 1:
            deciles = statistics.quantiles(timed, n=10, method="inclusive")
        return {
            "mean": statistics.fmean(timed),
            "p10": deciles[0],
            "p50": statistics.median(timed),
            "p90": deciles[8],
            "max": max(timed),
            "steps": len(timed),
        }


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():  # a run on the CPU of a machine with GPUs leaves these alone
        torch.cuda.synchronize()
