"""Compares two benches cell by cell, with regressions first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from shardwise.base.words import NOTHING, listed, number, one_line, size, span
from shardwise.lab.report.columns import SAMPLES
from shardwise.lab.report.folder import BenchFolder, read_bench
from shardwise.lab.report.names import fact
from shardwise.lab.report.summary import SAME_MEMORY
from shardwise.lab.report.tables import Row, differing_keys, environments, make_rows, run_settings

MOST_KEYS = 5
"""The most parts of a note on differing keys."""


@dataclass(frozen=True)
class Change:
    """A cell of bench B against the same cell of bench A. Ratios are B / A, or None."""

    a: Row
    b: Row
    note: str = ""  # why there are no ratios
    speed: float | None = None  # ratio of tokens/s
    speed_range: tuple[float, float] | None = None  # smallest and largest ratio of any two rounds
    memory: float | None = None  # ratio of peak memory
    lost: bool = False  # A has figures of the same work and B has none

    @property
    def effects(self) -> list[str]:
        """Return what changed by more than the spread of the rounds, or SAME_MEMORY."""
        effects = []
        if self.speed_range and self.speed_range[1] < 1:
            effects.append("slower")
        if self.speed_range and self.speed_range[0] > 1:
            effects.append("faster")
        if self.memory and abs(self.memory - 1) > SAME_MEMORY:
            effects.append("more memory" if self.memory > 1 else "less memory")
        return effects

    @property
    def regression(self) -> bool:
        """Return whether B is slower or larger than A, or has lost its figures."""
        return self.lost or not {"slower", "more memory"}.isdisjoint(self.effects)

    @property
    def rank(self) -> float:
        """Return the worse of the two ratios, or infinity without any. Cells are sorted by it."""
        if self.lost:
            return 0.0
        return min(self.speed or math.inf, 1 / self.memory if self.memory else math.inf)

    @property
    def summary(self) -> str:
        """Return the change in a few words."""
        words = self.effects
        if self.speed and not self.speed_range:
            words.append("one round, so no spread is known")
        for name, row in (("A", self.a), ("B", self.b)):
            if row.state == "unchecked":
                words.append(f"{name} is unchecked")
        return self.note or ", ".join(words) or "no change beyond the spread"

    @property
    def figures(self) -> list[str]:
        """Return the figures of both cells, one line each."""
        lines = []
        if self.speed:
            speeds = f"{number(self.a.tokens_per_second)} -> {number(self.b.tokens_per_second)}"
            rounds = f", rounds {span(self.speed_range)}" if self.speed_range else ""
            lines.append(f"tokens/s  {self.speed:.3f}  {speeds}{rounds}")
            samples = [SAMPLES.text(row) for row in (self.a, self.b)]
            lines.append(f"samples/s        {' -> '.join(samples)}")
        if self.memory:
            peaks = f"{size(self.a.peak_memory_bytes)} -> {size(self.b.peak_memory_bytes)}"
            lines.append(f"memory    {self.memory:.3f}  {peaks}")
        return lines


def changes(a: BenchFolder, b: BenchFolder) -> list[Change]:
    """Return the changes of the cells of both benches: regressions first, no ratio last."""
    cells_a, cells_b = _cells(a), _cells(b)
    both = [_change(row, cells_b[name]) for name, row in cells_a.items() if name in cells_b]
    return sorted(both, key=lambda change: change.rank)


def _cells(bench: BenchFolder) -> dict[str, Row]:
    """Return the rows of a bench by cell id, without noise controls."""
    return {row.plan.id: row for row in make_rows(bench) if not row.plan.control}


def _change(a: Row, b: Row) -> Change:
    """Return the change of one cell. Cells that did different work have no ratio."""
    if difference := _different_work(a, b):
        return Change(a, b, f"different work: {difference}")
    if not (a.measured and b.measured):
        return Change(a, b, f"A: {a.state}, B: {b.state}", lost=a.measured)
    speed = memory = speed_range = None
    if a.tokens_per_second and b.tokens_per_second:
        speed = b.tokens_per_second / a.tokens_per_second
        if a.tokens_range and b.tokens_range and a.tokens_range[0] > 0:
            (slowest_a, fastest_a), (slowest_b, fastest_b) = a.tokens_range, b.tokens_range
            speed_range = (slowest_b / fastest_a, fastest_b / slowest_a)
    if a.peak_memory_bytes and b.peak_memory_bytes:
        memory = b.peak_memory_bytes / a.peak_memory_bytes
    return Change(a, b, "" if speed or memory else "nothing measured", speed, speed_range, memory)


def _different_work(a: Row, b: Row) -> str:
    """Return how the run files of two cells differ, or nothing where they are equal."""
    parts = []
    if a.record is not None and b.record is not None:
        facts_a, facts_b = run_settings(a.record), run_settings(b.record)
        for key in differing_keys(a.record, b.record):
            value_a, value_b = facts_a.get(key, NOTHING), facts_b.get(key, NOTHING)
            parts.append(one_line(f"{key} {value_a} -> {value_b}", 120))
    if not parts and a.plan.nproc != b.plan.nproc:
        parts = [f"{a.plan.nproc} -> {b.plan.nproc} processes"]
    return listed(parts, MOST_KEYS)


def compare(folder_a: str | Path, folder_b: str | Path) -> Text:
    """Return the comparison of two benches for a terminal.

    Raises UserError where a folder holds no bench. Cells are lines rather than rows of a table: a
    narrow terminal or a pipe would cut the last columns.
    """
    a, b = read_bench(folder_a), read_bench(folder_b)
    cells_a, cells_b = _cells(a), _cells(b)
    lines = [f"A: {folder_a}", f"B: {folder_b}"]
    for name, cells, others in (("A", cells_a, cells_b), ("B", cells_b, cells_a)):
        if alone := [cell for cell in cells if cell not in others]:
            lines.append(f"only in {name}: {', '.join(alone)}")
    lines += _environment_differences([*cells_a.values()], [*cells_b.values()])
    has_both = bool(cells_a.keys() & cells_b.keys())
    lines += ["", "B / A, regressions first" if has_both else "no cell is in both"]
    text = Text("\n".join(lines))
    for change in changes(a, b):
        style = "red" if change.regression else "dim" if change.note else ""
        text.append(f"\n\n{change.a.plan.id}: {change.summary}", style=f"bold {style}")
        for line in change.figures:
            text.append(f"\n    {line}", style=style)
    return text


def _environment_differences(a: Sequence[Row], b: Sequence[Row]) -> list[str]:
    """Return a line for each fact of the environment that differs: the ratios depend on it too."""
    facts_a, facts_b = environments(a), environments(b)
    lines = []
    for key in dict.fromkeys([*facts_a, *facts_b]):
        values_a, values_b = facts_a.get(key, []), facts_b.get(key, [])
        if values_a != values_b:
            change = f"{', '.join(map(fact, values_a))} -> {', '.join(map(fact, values_b))}"
            lines.append(f"note: {key} differs: {change}")
    return lines
