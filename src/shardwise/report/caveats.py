"""What a reader of the figures must know first, derived from where and how they were taken."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.folder import Bench
from shardwise.report.tables import Row, environments, findings, groups_of
from shardwise.report.words import fact, group_title, number, percent, printable, size, times

FEWEST_ROUNDS = 3
"""With fewer, no cell is called the fastest."""


def caveats(bench: Bench, rows: Sequence[Row]) -> list[str]:
    """What a reader of these figures must know, derived from where and how they were taken."""
    places, ran = environments(rows), [row for row in rows if row.record]
    found = []
    many = max((row.plan.nproc for row in ran), default=1)
    if places.get("cuda") and not any(places["cuda"]):
        found.append("Measured on CPU cores: this says nothing about how fast a GPU is.")
        if many > 1:
            found.append("The processes talk through gloo on one machine: this says nothing about NCCL or a network.")
        cores = min((n for n in places.get("cpu_count", []) if n), default=many)
        if many > cores:
            found.append(f"Up to {many} processes shared {cores} cores: those cells' speeds are of a crowded machine.")
    for key, values in places.items():
        if len(values) > 1:
            found.append(f"Not all cells ran with the same {key}: {', '.join(map(fact, values))}.")
    if bench.sweep.rounds < FEWEST_ROUNDS:
        rounds = "one round" if bench.sweep.rounds == 1 else f"{bench.sweep.rounds} rounds"
        found.append(f"Taken in {rounds}: enough for losses and memory, too few to say which cell is faster.")
    timed = [row for row in ran if row.measured and not row.plan.control]
    short = sum(_good_rounds(row) < bench.sweep.rounds for row in timed)
    if short:
        found.append(f"{short} of {len(timed)} cells with figures have fewer than {bench.sweep.rounds} good rounds.")
    unchecked = sum(row.state == "unchecked" for row in rows)
    if unchecked:
        found.append(f"{unchecked} cells are unchecked: nothing shows that they computed the right thing.")
    return found + _notes(ran)


def _notes(ran: Sequence[Row]) -> list[str]:
    """What the records themselves ask to be known, once each, with the cells that say so unless all do."""
    said: dict[str, list[str]] = {}
    for row in ran:
        for note in row.record.notes if row.record else []:
            said.setdefault(note, []).append(row.plan.id)
    return [
        printable(note if len(cells) == len(ran) else f"{', '.join(cells[:3])}{' …' * (len(cells) > 3)}: {note}", 400)
        for note, cells in said.items()
    ]


def _good_rounds(row: Row) -> int:
    return sum(a_round.get("status") == "ok" for a_round in row.record.rounds) if row.record else 0


def in_short(bench: Bench, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The title of each group, empty where there is one alone, and its answer in a sentence or two."""
    found = []
    for group, cells in groups_of(rows).items():
        fastest, leanest = findings(cells)
        fast = lean = ""
        if bench.sweep.rounds < FEWEST_ROUNDS:
            fastest = None
        if fastest:
            by = f", {times(fastest.speedup)} its reference" if fastest.speedup and not fastest.is_reference else ""
            fast = f"is fastest ({number(fastest.tokens_per_second)} tokens/s{by}{_overlap(fastest, cells)})"
        if leanest:
            by = f", {percent(leanest.saving)} less than {leanest.saving_over}" if (leanest.saving or 0) > 0 else ""
            lean = f"needs the least memory ({size(leanest.peak_memory_bytes)}{by})"
        if fastest and leanest and fastest is leanest:
            text = f"{fastest.name} {fast} and {lean}."
        else:
            both = ((fastest, fast), (leanest, lean))
            text = " ".join(f"{row.name} {what}." for row, what in both if row) or "No cell has figures yet."
        found.append((group_title(group, bench.sweep), text))
    return found


def _overlap(fastest: Row, cells: Sequence[Row]) -> str:
    """Which cells had a round as fast as the slowest of the fastest cell's."""
    if fastest.tokens_range is None:
        return ""
    slowest = fastest.tokens_range[0]
    close = [
        row.label
        for row in cells
        if row is not fastest and not row.plan.control and row.tokens_range and row.tokens_range[1] >= slowest
    ]
    return f"; its rounds overlap with {', '.join(close[:3])}{' and more' if len(close) > 3 else ''}" if close else ""
