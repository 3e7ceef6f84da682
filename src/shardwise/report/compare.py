"""Two benches side by side: what became slower or larger, cell by cell, regressions first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwise.report.folder import Bench, read_bench
from shardwise.report.tables import Row, environments, make_rows
from shardwise.report.words import NOTHING, fact, number, size


@dataclass(frozen=True)
class Change:
    """How a cell of B is against the same cell of A; None where there is nothing to compare."""

    id: str
    speed: float | None = None  # B / A of tokens/s
    speed_range: tuple[float, float] | None = None  # B's slowest round / A's fastest, B's fastest / A's slowest
    memory: float | None = None  # B / A of peak memory
    note: str = ""  # why there is no ratio
    lost: bool = False  # A has figures that may be told, B has not

    @property
    def worst(self) -> float:
        """The smaller of the speed ratio and the inverse memory ratio: below 1 where something got worse."""
        ratios = [self.speed, 1 / self.memory if self.memory else None]
        return 0.0 if self.lost else min((ratio for ratio in ratios if ratio), default=math.inf)

    @property
    def worse(self) -> bool:
        """Whether B is a regression, doubts of the spread aside."""
        return self.lost or any(word in self.verdict for word in ("slower", "larger"))

    @property
    def verdict(self) -> str:
        """In a word: speed only where the spread of the rounds leaves no doubt, memory from 0.5 % on."""
        words = []
        if self.speed_range:
            low, high = self.speed_range
            words.append("slower" if high < 1 else "faster" if low > 1 else "as fast, within the spread")
        elif self.speed:
            words.append("one round, so no spread is known")
        if self.memory and abs(self.memory - 1) > 0.005:
            words.append("larger" if self.memory > 1 else "leaner")
        return ", ".join(words)


def changes(a: Bench, b: Bench) -> list[Change]:
    """Every cell that both have, regressions first; then those without a ratio, with the reason."""
    rows_a, rows_b = ({row.plan.id: row for row in make_rows(bench) if not row.plan.control} for bench in (a, b))
    found = [
        _change(row, rows_b[name], differing(a, b, row.plan.group, rows_b[name].plan.group))
        for name, row in rows_a.items()
        if name in rows_b
    ]
    return sorted(found, key=lambda change: change.worst)


def differing(a: Bench, b: Bench, group_a: str, group_b: str) -> list[str]:
    """What of their work the two groups were not given equally."""
    of_a, of_b = a.sweep.equal.get(group_a, {}), b.sweep.equal.get(group_b, {})
    return [
        f"{key} {of_a.get(key, NOTHING)} -> {of_b.get(key, NOTHING)}"
        for key in sorted(of_a.keys() | of_b.keys())
        if of_a.get(key, ...) != of_b.get(key, ...)
    ]


def _change(a: Row, b: Row, different: list[str]) -> Change:
    if different:
        return Change(a.plan.id, note=f"other work: {', '.join(different)}")
    if a.plan.nproc != b.plan.nproc:
        return Change(a.plan.id, note=f"{a.plan.nproc} processes against {b.plan.nproc}")
    if not (a.measured and b.measured):
        return Change(a.plan.id, note=f"A {a.state}, B {b.state}", lost=a.measured)
    speed = memory = spread = None
    if a.tokens_per_second and b.tokens_per_second:
        speed = b.tokens_per_second / a.tokens_per_second
        if a.tokens_range and b.tokens_range:
            spread = (b.tokens_range[0] / a.tokens_range[1], b.tokens_range[1] / a.tokens_range[0])
    if a.peak_memory_bytes and b.peak_memory_bytes:
        memory = b.peak_memory_bytes / a.peak_memory_bytes
    return Change(a.plan.id, speed, spread, memory, "" if speed or memory else "nothing was measured")


def compare(folder_a: str | Path, folder_b: str | Path) -> Group:
    """What a terminal shows of two benches; UserError where a folder holds none."""
    a, b = read_bench(folder_a), read_bench(folder_b)
    rows_a, rows_b = ({row.plan.id: row for row in make_rows(bench) if not row.plan.control} for bench in (a, b))
    table = Table(box=SIMPLE, title="B / A, regressions first", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold")
    for name in ("tokens/s", "from rounds", "A", "B", "memory", "A", "B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for change in changes(a, b):
        row_a, row_b = rows_a[change.id], rows_b[change.id]
        verdict = change.note or change.verdict
        cells = [
            change.id,
            _times(change.speed),
            f"{change.speed_range[0]:.2f} – {change.speed_range[1]:.2f}" if change.speed_range else NOTHING,
            number(row_a.tokens_per_second),
            number(row_b.tokens_per_second),
            _times(change.memory),
            size(row_a.peak_memory_bytes),
            size(row_b.peak_memory_bytes),
            verdict,
        ]
        table.add_row(*map(Text, cells), style="red" if change.worse else "dim" if change.note else "")
    lines = [
        f"A: {folder_a}",
        f"B: {folder_b}",
        *(f"only in {name}: {', '.join(ids)}" for name, ids in _alone(rows_a, rows_b) if ids),
        *_elsewhere(list(rows_a.values()), list(rows_b.values())),
    ]
    if not rows_a.keys() & rows_b.keys():
        return Group(*map(Text, lines), Text("no cell is in both"))
    return Group(*map(Text, lines), table)


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.3f}"


def _alone(a: dict[str, Row], b: dict[str, Row]) -> list[tuple[str, list[str]]]:
    return [("A", [name for name in a if name not in b]), ("B", [name for name in b if name not in a])]


def _elsewhere(a: list[Row], b: list[Row]) -> list[str]:
    """Facts of the environment that differ: a ratio across them is of these too."""
    of_a, of_b = environments(a), environments(b)
    return [
        f"note: {key} differs: {', '.join(map(fact, of_a.get(key, [])))} -> {', '.join(map(fact, of_b.get(key, [])))}"
        for key in dict.fromkeys([*of_a, *of_b])
        if of_a.get(key) != of_b.get(key)
    ]
