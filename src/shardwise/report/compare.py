"""Two benches side by side: what became slower or larger, cell by cell, regressions first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from shardwise.report.folder import Bench, read_bench
from shardwise.report.headline import SAME_MEMORY
from shardwise.report.tables import Row, differing_keys, environments, flat, make_rows
from shardwise.report.words import NOTHING, fact, number, printable, size


@dataclass(frozen=True)
class Change:
    """How a cell of B is against the same cell of A; None where there is nothing to compare."""

    a: Row
    b: Row
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
        if self.memory and abs(self.memory - 1) > SAME_MEMORY:
            words.append("larger" if self.memory > 1 else "leaner")
        words += [f"{name} unchecked" for name, row in (("A", self.a), ("B", self.b)) if row.state == "unchecked"]
        return ", ".join(words) or "as before"


def changes(a: Bench, b: Bench) -> list[Change]:
    """Every cell that both have, regressions first; then those without a ratio, with the reason."""
    rows_a, rows_b = _cells(a), _cells(b)
    found = [_change(row, rows_b[name]) for name, row in rows_a.items() if name in rows_b]
    return sorted(found, key=lambda change: change.worst)


def _cells(bench: Bench) -> dict[str, Row]:
    return {row.plan.id: row for row in make_rows(bench) if not row.plan.control}


def _change(a: Row, b: Row) -> Change:
    if a.record is not None and b.record is not None and (keys := differing_keys(a.record, b.record)):
        of_a, of_b = flat(a.record), flat(b.record)
        named = (f"{key} {of_a.get(key, NOTHING)} -> {of_b.get(key, NOTHING)}" for key in keys[:4])
        more = f", and {len(keys) - 4} keys more" if len(keys) > 4 else ""
        return Change(a, b, note=f"other work: {', '.join(printable(one, 120) for one in named)}{more}")
    if a.plan.nproc != b.plan.nproc:
        return Change(a, b, note=f"other work: {a.plan.nproc} processes -> {b.plan.nproc}")
    if not (a.measured and b.measured):
        return Change(a, b, note=f"A {a.state}, B {b.state}", lost=a.measured)
    speed = memory = spread = None
    if a.tokens_per_second and b.tokens_per_second:
        speed = b.tokens_per_second / a.tokens_per_second
        if a.tokens_range and b.tokens_range and a.tokens_range[0] > 0:
            spread = (b.tokens_range[0] / a.tokens_range[1], b.tokens_range[1] / a.tokens_range[0])
    if a.peak_memory_bytes and b.peak_memory_bytes:
        memory = b.peak_memory_bytes / a.peak_memory_bytes
    return Change(a, b, speed, spread, memory, "" if speed or memory else "nothing was measured")


def compare(folder_a: str | Path, folder_b: str | Path) -> Text:
    """What a terminal shows of two benches; UserError where a folder holds none.

    Lines, two for a cell, and no table: a narrow terminal or a pipe would lose its last columns.
    """
    a, b = read_bench(folder_a), read_bench(folder_b)
    rows_a, rows_b = _cells(a), _cells(b)
    lines = [
        f"A: {folder_a}",
        f"B: {folder_b}",
        *(f"only in {name}: {', '.join(ids)}" for name, ids in _alone(rows_a, rows_b) if ids),
        *_elsewhere(list(rows_a.values()), list(rows_b.values())),
        "",
        "B / A, regressions first" if rows_a.keys() & rows_b.keys() else "no cell is in both",
    ]
    text = Text("\n".join(lines))
    for change in changes(a, b):
        style = "red" if change.worse else "dim" if change.note else ""
        text.append(f"\n\n{change.a.plan.id}: {change.note or change.verdict}", style=f"bold {style}")
        text.append("".join(f"\n    {line}" for line in _figures(change)), style=style)
    return text


def _figures(change: Change) -> list[str]:
    a, b = change.a, change.b
    found = []
    if change.speed:
        speeds = f"{number(a.tokens_per_second)} -> {number(b.tokens_per_second)}"
        low_high = change.speed_range
        spread = f", from rounds {low_high[0]:.2f} – {low_high[1]:.2f}" if low_high else ""
        found.append(f"tokens/s  {change.speed:.3f}  {speeds}{spread}")
    if change.memory:
        found.append(f"memory    {change.memory:.3f}  {size(a.peak_memory_bytes)} -> {size(b.peak_memory_bytes)}")
    return found


def _alone(a: dict[str, Row], b: dict[str, Row]) -> list[tuple[str, list[str]]]:
    return [("A", [name for name in a if name not in b]), ("B", [name for name in b if name not in a])]


def _elsewhere(a: Sequence[Row], b: Sequence[Row]) -> list[str]:
    """Facts of the environment that differ: a ratio across them is of these too."""
    of_a, of_b = environments(a), environments(b)
    return [
        f"note: {key} differs: {', '.join(map(fact, of_a.get(key, [])))} -> {', '.join(map(fact, of_b.get(key, [])))}"
        for key in dict.fromkeys([*of_a, *of_b])
        if of_a.get(key) != of_b.get(key)
    ]
