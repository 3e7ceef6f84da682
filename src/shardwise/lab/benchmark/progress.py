"""The output of a bench: a line for each run, and one table at the end."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from shardwise.base.records.cell import CellPlan, CellRecord
from shardwise.base.words import counted, duration, percent
from shardwise.lab.benchmark.cells import CellState
from shardwise.lab.benchmark.sweep import Cell

MIB = 2**20
COLUMNS = ("cell", "status", "rounds", "tokens/s", "peak MiB", "reason")
NUMBERS = ("rounds", "tokens/s", "peak MiB")


def print_start(state: CellState, cells: Sequence[CellState], total: int) -> None:
    """Print the first half of a run's line: its number among the runs of all cells, and its name.

    Each of `cells` has `total` rounds.
    """
    num_done = sum(len(other.rounds) for other in cells)
    num_runs = num_done + sum(len(other.remaining(total)) for other in cells)
    name = f"{state.cell.plan.id}, round {len(state.rounds) + 1}"
    print(f"run {num_done + 1} of {num_runs}: {name}: ", end="", flush=True)


def print_end(state: CellState, cells: Sequence[CellState], total: int) -> None:
    """Print the second half: how the last round of a cell ended, and the time left for all."""
    entry = state.rounds[-1]
    rate = f"{entry.tokens_per_second:,.0f} tokens/s" if entry.tokens_per_second else ""
    others = f"other programs took {percent(entry.others_share or 0)} of the CPUs"
    parts = (entry.status, rate or entry.reason, others if entry.is_disturbed else "")
    outcome = ", ".join(filter(None, parts))
    left = duration(time_left(cells, total))
    print(f"{outcome}, {entry.wall_seconds:.1f} s; {left} left", flush=True)


def time_left(cells: Sequence[CellState], total: int) -> float:
    """Return the seconds that the remaining rounds will take. At least one round has ended.

    A round is assumed to take the median of its cell's rounds, or of all rounds where its cell has
    none.
    """
    all_seconds = [seconds for state in cells for seconds in _round_seconds(state)]
    left = 0.0
    for state in cells:
        per_round = statistics.median(_round_seconds(state) or all_seconds)
        left += len(state.remaining(total)) * per_round
    return left


def _round_seconds(state: CellState) -> list[float]:
    return [entry.wall_seconds for entry in state.rounds if entry.wall_seconds is not None]


def plan_table(cells: Sequence[Cell], total: int) -> str:
    """Return one line of plain text per cell that would run, and the number of all runs."""
    runs = [len(CellState(cell, Path()).remaining(total)) for cell in cells]
    rows = [("cell", "processes", "runs", "")]
    for cell, number in zip(cells, runs, strict=True):
        remark = f"unsupported: {cell.refusal}" if cell.refusal else ""
        remark = "noise control" if cell.plan.control else remark
        rows.append((cell.plan.id, str(cell.plan.nproc), str(number), remark))
    most = max(cell.plan.nproc for cell in cells)
    last = f"{sum(runs)} runs of {counted(len(cells), 'cell')}, of up to {most} processes each"
    return f"{_aligned(rows, ('processes', 'runs'))}\n{last}"


def result_table(records: Sequence[CellRecord]) -> str:
    """Return one line of plain text per cell.

    Columns: id, status, number of rounds, tokens/s as median [min-max], peak memory of a rank in
    MiB, reason.
    """
    return _aligned([COLUMNS, *map(_row, records)], NUMBERS)


def _aligned(rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> str:
    """Return rows as lines; the first has the names of columns, and the last column is as it is."""
    names = rows[0]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) - 1)]
    lines = []
    for row in rows:
        columns = []
        for name, text, width in zip(names, row, widths, strict=False):
            columns.append(text.rjust(width) if name in numbers else text.ljust(width))
        lines.append("  ".join([*columns, row[-1]]).rstrip())
    return "\n".join(lines)


def _row(record: CellRecord) -> tuple[str, str, str, str, str, str]:
    """Return a cell's row under COLUMNS."""
    plan = CellPlan(**record.cell)
    remark = "noise control: only its losses count" if plan.control else ""
    rate = peak = ""
    if record.tokens_per_second is not None and "tokens_per_second" in record.spread:
        low, high = record.spread["tokens_per_second"]
        rate = f"{record.tokens_per_second:,.0f} [{low:,.0f}-{high:,.0f}]"
    if record.peak_memory_bytes:
        peak = f"{max(record.peak_memory_bytes) / MIB:,.1f}"
    reason = "; ".join(filter(None, (remark, record.reason)))
    return plan.id, record.status, str(len(record.rounds)), rate, peak, reason
