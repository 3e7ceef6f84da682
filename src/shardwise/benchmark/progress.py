"""The output of a bench: a live table in a terminal, else a line per run; a table at the end."""

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
from shardwise.words import duration

MIB = 2**20
COLUMNS = ("cell", "status", "rounds", "tokens/s", "peak MiB", "reason")
NUMBERS = ("rounds", "tokens/s", "peak MiB")


class Display:
    """Shows the runs of `cells`, each of which has `total` rounds."""

    def __init__(self, title: str, cells: Sequence[CellState], total: int) -> None:
        self._title, self._cells, self._total = title, cells, total
        self._running: CellState | None = None
        self._started = 0.0  # of the round that is running, in seconds of the monotonic clock
        self._console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._live = None
        if sys.stdout.isatty() and not self._console.is_dumb_terminal:
            # Every two seconds, as drawing takes time on the cores that are measured.
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=0.5
            )

    def start(self, state: CellState) -> None:
        """Show that a round of this cell begins."""
        self._running, self._started = state, time.monotonic()
        if self._live is not None:
            self._live.refresh()

    def end(self, state: CellState) -> None:
        """Show that the last round of this cell has ended."""
        self._running = None
        if self._live is None:
            entry = state.rounds[-1]
            rate = f"{entry.tokens_per_second:,.0f} tokens/s" if entry.tokens_per_second else ""
            outcome = ", ".join(filter(None, (entry.status, rate or entry.reason)))
            name = f"{state.cell.plan.id}, round {len(state.rounds)}"
            ended = f"{self._progress()}: {name}: {outcome}, {entry.wall_seconds:.1f} s"
            self._console.print(f"{ended}; {self._time_left()}")
            sys.stdout.flush()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _progress(self) -> str:
        num_done = sum(len(state.rounds) for state in self._cells)
        num_remaining = sum(len(state.remaining(self._total)) for state in self._cells)
        return f"run {num_done} of {num_done + num_remaining}"

    def _time_left(self) -> str:
        left = time_left(self._cells, self._total, self._running, self._elapsed())
        return "time left unknown" if left is None else f"{duration(left)} left"

    def _table(self) -> Group:
        """Return the live table, one row per cell, below a line on the whole bench."""
        headline = f"{self._title}: {self._progress()} · {self._time_left()}"
        if self._running is not None:
            name, number = self._running.cell.plan.id, len(self._running.rounds) + 1
            headline += f" · {name}, round {number}: {duration(self._elapsed())}"
        table = Table(box=box.SIMPLE_HEAD)
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in NUMBERS else "left")
        for state in self._cells:
            is_running = self._running is state
            row = _row(state.cell.plan, state.record, len(state.rounds), is_running)
            table.add_row(*map(Text, row))
        return Group(Text(headline), table)


def time_left(
    cells: Sequence[CellState], total: int, running: CellState | None = None, elapsed: float = 0.0
) -> float | None:
    """Return the seconds that the remaining rounds will take, or None before any round has ended.

    A round is assumed to take the median of its cell's rounds, or of all rounds where its cell has
    none. Of the round of `running`, `elapsed` seconds are over.
    """
    all_seconds = [seconds for state in cells for seconds in _round_seconds(state)]
    if not all_seconds:
        return None
    left = 0.0
    for state in cells:
        per_round = statistics.median(_round_seconds(state) or all_seconds)
        left += len(state.remaining(total)) * per_round
        if state is running:
            left -= min(elapsed, per_round)
    return left


def _round_seconds(state: CellState) -> list[float]:
    return [entry.wall_seconds for entry in state.rounds if entry.wall_seconds is not None]


def result_table(records: Sequence[CellRecord]) -> str:
    """Return one line of plain text per cell.

    Columns: id, status, number of rounds, tokens/s as median [min-max], peak memory of a rank in
    MiB, reason.
    """
    rows = [COLUMNS]
    rows += [_row(CellPlan(**record.cell), record, len(record.rounds), False) for record in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS) - 1)]
    lines = []
    for row in rows:
        columns = []
        for name, text, width in zip(COLUMNS, row, widths, strict=False):
            columns.append(text.rjust(width) if name in NUMBERS else text.ljust(width))
        lines.append("  ".join([*columns, row[-1]]).rstrip())
    return "\n".join(lines)


def _row(
    plan: CellPlan, record: CellRecord | None, num_rounds: int, is_running: bool
) -> tuple[str, str, str, str, str, str]:
    """Return a cell's row under COLUMNS."""
    remark = "noise control: only its losses count" if plan.control else ""
    if record is None:
        return plan.id, "running" if is_running else "waiting", "0", "", "", remark
    rate = peak = ""
    if record.tokens_per_second is not None and "tokens_per_second" in record.spread:
        low, high = record.spread["tokens_per_second"]
        rate = f"{record.tokens_per_second:,.0f} [{low:,.0f}-{high:,.0f}]"
    if record.peak_memory_bytes:
        peak = f"{max(record.peak_memory_bytes) / MIB:,.1f}"
    status = "running" if is_running else record.status
    reason = "; ".join(filter(None, (remark, record.reason)))
    return plan.id, status, str(num_rounds), rate, peak, reason
