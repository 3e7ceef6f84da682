"""What a person sees of a bench: a live table in a terminal, elsewhere a line for each run; one table at the end."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise.benchmark.cells import CellState
from shardwise.records.cell import CellPlan, CellRecord

MIB = 2**20


class Display:
    """Follows the runs of `cells`; every one of them is to have `total` rounds."""

    def __init__(self, title: str, cells: Sequence[CellState], total: int) -> None:
        self._title, self._cells, self._total = title, cells, total
        self._running: tuple[CellState, float] | None = None  # and since when
        self._console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._live = None
        if sys.stdout.isatty() and not self._console.is_dumb_terminal:
            # Drawn seldom: that takes time on the cores that are measured.
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=0.5)

    def start(self, state: CellState) -> None:
        """A run of this cell begins."""
        self._running = (state, time.monotonic())
        if self._live is not None:
            self._live.refresh()

    def end(self, state: CellState) -> None:
        """It has ended, and its round is known."""
        self._running = None
        if self._live is None:
            entry = state.rounds[-1]
            figure = f"{entry.tokens_per_second:,.0f} tokens/s" if entry.tokens_per_second else entry.reason
            told = f"{entry.status}, {figure}" if figure else entry.status
            name = f"{state.cell.plan.id}, round {len(state.rounds)}"
            self._console.print(f"{self._progress()}: {name}: {told}, {entry.wall_seconds:.1f} s; {self._left()}")
            sys.stdout.flush()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _progress(self) -> str:
        done = sum(len(state.rounds) for state in self._cells)
        return f"run {done} of {done + sum(len(state.remaining(self._total)) for state in self._cells)}"

    def _left(self) -> str:
        state, since = self._running or (None, 0.0)
        left = time_left(self._cells, self._total, state, time.monotonic() - since)
        return "time left unknown" if left is None else f"{duration(left)} left"

    def _table(self) -> Group:
        running = ""
        if self._running is not None:
            state, since = self._running
            number = len(state.rounds) + 1
            running = f" · {state.cell.plan.id}, round {number}: {duration(time.monotonic() - since)}"
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("cell", "status", "rounds", "tokens/s", "peak MiB", "reason"):
            table.add_column(name, justify="right" if name in ("rounds", "tokens/s", "peak MiB") else "left")
        for state in self._cells:
            here = self._running is not None and self._running[0] is state
            table.add_row(*map(Text, _row(state.cell.plan, state.record, len(state.rounds), here)))
        return Group(Text(f"{self._title}: {self._progress()} · {self._left()}{running}"), table)


def time_left(
    cells: Sequence[CellState], total: int, running: CellState | None = None, elapsed: float = 0.0
) -> float | None:
    """Seconds that the remaining rounds will take, each as long as its cell's median, or the median of all rounds.

    Of the round that is running, `elapsed` seconds are over. None before any round has ended.
    """
    walls = [entry.wall_seconds for state in cells for entry in state.rounds if entry.wall_seconds is not None]
    if not walls:
        return None
    seconds = 0.0
    for state in cells:
        own = [entry.wall_seconds for entry in state.rounds if entry.wall_seconds is not None]
        each = statistics.median(own or walls)
        seconds += len(state.remaining(total)) * each - (min(elapsed, each) if state is running else 0.0)
    return seconds


def duration(seconds: float) -> str:
    """Such as `1 h 05 min`, `3 min 20 s` or `7 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"


def result_table(records: Sequence[CellRecord]) -> str:
    """One plain line for each cell: id, status, tokens/s as median [min-max], peak MiB of a rank, reason."""
    rows = [("cell", "status", "rounds", "tokens/s", "peak MiB", "reason")]
    rows += [_row(CellPlan(**record.cell), record, len(record.rounds), False) for record in records]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for cell, status, rounds, rate, peak, reason in rows:
        left = f"{cell:{widths[0]}}  {status:{widths[1]}}  {rounds:>{widths[2]}}"
        lines.append(f"{left}  {rate:>{widths[3]}}  {peak:>{widths[4]}}  {reason}".rstrip())
    return "\n".join(lines)


def _row(plan: CellPlan, record: CellRecord | None, rounds: int, running: bool) -> tuple[str, str, str, str, str, str]:
    control = "control, for its losses alone" if plan.control else ""
    if record is None:
        return plan.id, "running" if running else "waiting", "0", "", "", control
    rate = peak = ""
    if record.tokens_per_second is not None and "tokens_per_second" in record.spread:
        low, high = record.spread["tokens_per_second"]
        rate = f"{record.tokens_per_second:,.0f} [{low:,.0f}-{high:,.0f}]"
    if record.peak_memory_bytes:
        peak = f"{max(record.peak_memory_bytes) / MIB:,.1f}"
    status = "running" if running else record.status
    return plan.id, status, str(rounds), rate, peak, "; ".join(filter(None, (control, record.reason)))
