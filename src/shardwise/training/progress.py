"""The progress of a run on the screen: a live bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TextIO

from rich import progress as bars
from rich.console import Console

from shardwise.base.words import size

MOST_SECONDS = 100 * 365 * 86_400.0
"""The longest time to come that is printed."""


class Progress:
    """Shows a run of `total_steps` steps; with `show` False (on every rank except 0) it is silent.

    With `epochs`, those that the steps come to, it also shows how far into them the run is.

    In a terminal one line at the bottom follows the steps and stays when the run ends. Elsewhere,
    as in a log file, `update` prints a line with the time of day for the first step, then where
    the last line is `every_seconds` old by `clock`; and the end prints the last state.
    """

    def __init__(
        self,
        total_steps: int,
        epochs: float | None = None,
        show: bool = True,
        stream: TextIO | None = None,
        every_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        stream = stream or sys.stdout
        self._console = Console(file=stream, quiet=not show)
        self._total_steps = total_steps
        self._epochs = epochs
        self._every_seconds, self._clock, self._now = every_seconds, clock, now
        self._started = self._printed = clock()
        self._num_done = 0
        self._last = ""
        # Not rich's own answer: FORCE_COLOR, which many CI systems set, is a terminal to rich.
        self._live = show and stream.isatty() and not self._console.is_dumb_terminal
        self._bar = bars.Progress(
            bars.TextColumn("step {task.completed}/{task.total}"),
            bars.BarColumn(bar_width=20),
            bars.TextColumn("{task.description}"),
            bars.TextColumn("· time left"),
            bars.TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=3600,  # seconds; 30, the default, is less than a long step
        )
        self._task = self._bar.add_task("", total=total_steps)

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Show that `step` (from 1) is done.

        `loss` is its mean loss, `tokens_per_second` that of all ranks, `memory_bytes` this rank's.
        """
        self._num_done += 1
        parts = [f"loss {loss:.4f}"]
        if self._epochs is not None:
            done = self._epochs * step / self._total_steps
            parts.insert(0, f"epoch {done:.2f}/{self._epochs:g}")
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if memory_bytes is not None:
            parts.append(size(memory_bytes))
        state = " · ".join(parts)
        self._last = f"step {step}/{self._total_steps}  {state}"
        if self._live:
            self._bar.update(self._task, completed=step, description=state)
        elif self._num_done == 1 or self._clock() >= self._printed + self._every_seconds:
            self.log(f"{self._last}{self._end(step)}")
            self._printed, self._last = self._clock(), ""

    def _end(self, step: int) -> str:
        """Return when the last step ends, if those to come are like those since the start.

        The first one, which is slower than the others, tells nothing.
        """
        num_left = self._total_steps - step
        if num_left == 0 or self._num_done == 1:
            return ""
        seconds = (self._clock() - self._started) / self._num_done * num_left
        now = self._now()
        end = now + timedelta(seconds=min(seconds, MOST_SECONDS))
        return f" · ends about {end:{'%H:%M' if end.date() == now.date() else '%Y-%m-%d %H:%M'}}"

    def flush(self) -> None:
        """Print the last state, where a line of it is still due and no bar shows it."""
        if self._last:
            self.log(self._last)
        self._last = ""

    def log(self, text: str) -> None:
        """Print a line with the time of day, and nothing in a terminal, where a bar shows it."""
        if not self._live:
            self.message(f"{self._now():%H:%M:%S} {text}")

    def message(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        self._started = self._printed = self._clock()
        if self._live:
            self._bar.start()
            self._console.show_cursor()  # rich hides it, and a killed process could not restore it
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()
        self.flush()
