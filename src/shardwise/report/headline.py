"""The answer of a bench in a sentence or two, and no more than its figures bear."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.folder import Bench
from shardwise.report.tables import Row, candidates, groups_of
from shardwise.report.words import group_title, number, percent, size, times

FEWEST_ROUNDS = 3
"""Of a cell that may be called the fastest, or slower than that."""
SAME_MEMORY = 0.005
"""Peaks this close to one another, as a share, are called equal."""


def in_short(bench: Bench, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The title of each group, empty where there is one alone, and its answer."""
    return [(group_title(group, bench.sweep), _answer(cells)) for group, cells in groups_of(rows).items()]


def _answer(cells: Sequence[Row]) -> str:
    known = [row for row in candidates(cells) if row.tokens_per_second or row.peak_memory_bytes]
    if not known:
        return "No cell has figures yet."
    if len(known) == 1:
        return f"{known[0].name} alone has figures to go by: nothing to compare."
    return " ".join(filter(None, [_fastest(known), _leanest(known)])) or "Too few figures to compare."


def _fastest(known: Sequence[Row]) -> str:
    timed = [row for row in known if row.tokens_per_second]
    rivals = [row for row in timed if row.good_rounds >= FEWEST_ROUNDS]
    if len(rivals) < 2:
        return ""
    best = max(rivals, key=lambda row: row.tokens_per_second or 0)
    slowest = best.tokens_range[0] if best.tokens_range else 0.0
    close = [row.name for row in rivals if row is not best and row.tokens_range and row.tokens_range[1] >= slowest]
    of = f"Of the {len(rivals)} cells with at least {FEWEST_ROUNDS} rounds, " if len(rivals) < len(timed) else ""
    by = f", {times(best.speedup)} {best.speedup_over}" if best.speedup and not best.is_baseline else ""
    figures = f"{number(best.tokens_per_second)} tokens/s{by}"
    if close:
        return f"{of}{best.name} has the highest median ({figures}), but its rounds overlap with {_listed(close)}."
    return f"{of}{best.name} is fastest ({figures})."


def _leanest(known: Sequence[Row]) -> str:
    sized = [row for row in known if row.peak_memory_bytes]
    if len(sized) < 2:
        return ""
    least = min(sized, key=lambda row: row.peak_memory_bytes or 0)
    peak = least.peak_memory_bytes or 0
    equal = [row.name for row in sized if (row.peak_memory_bytes or 0) <= peak * (1 + SAME_MEMORY)]
    if len(equal) == len(sized):
        return f"All need the same memory ({size(peak)})."
    saved = (least.saving or 0) > SAME_MEMORY
    by = f", {percent(least.saving)} less than {least.saving_over}" if saved else ""
    return f"{_listed(equal)} need{'s' * (len(equal) == 1)} the least memory ({size(peak)}{by})."


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`, `a, b, c and 4 more`."""
    shown = [*names] if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
