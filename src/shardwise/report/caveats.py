"""What a reader of the figures must know first, derived from where and how they were taken."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.headline import FEWEST_ROUNDS
from shardwise.report.tables import Row, environments, interleaved, rounds_of
from shardwise.report.words import fact, printable


def caveats(rows: Sequence[Row]) -> list[str]:
    """What a reader of these figures must know, derived from where and how they were taken."""
    places, ran = environments(rows), [row for row in rows if row.record]
    found = []
    many = max((row.plan.nproc for row in ran), default=1)
    timed = max((row.plan.nproc for row in ran if row.plan.timed), default=1)
    if places.get("cuda") and not any(places["cuda"]):
        found.append("Measured on CPU cores: this says nothing about how fast a GPU is.")
        if many > 1:
            found.append("The processes talk through gloo on one machine: this says nothing about NCCL or a network.")
        cores = min((n for n in places.get("cpu_count", []) if n and isinstance(n, int)), default=many)
        if timed > cores:
            found.append(f"Up to {timed} processes shared {cores} cores: those cells' speeds are of a crowded machine.")
    for key, values in places.items():
        if len(values) > 1:
            found.append(f"Not all cells ran with the same {key}: {', '.join(map(fact, values))}.")
    found += _of_rounds(rows)
    unchecked = sum(row.state == "unchecked" and not row.plan.control for row in rows)
    if unchecked:
        cells = "1 cell is" if unchecked == 1 else f"{unchecked} cells are"
        found.append(f"{cells} unchecked: nothing shows that the right thing was computed.")
    return found + _notes(ran)


def _of_rounds(rows: Sequence[Row]) -> list[str]:
    found, measured = [], [row for row in rows if row.measured and row.plan.timed]
    few = sum(row.good_rounds < FEWEST_ROUNDS for row in measured)
    if few == len(measured) > 0:
        taken = rounds_of(measured)
        found.append(f"Taken in {taken}: enough for losses and memory, too few to say which cell is faster.")
    elif few:
        said = f"{few} of {len(measured)} cells with figures have fewer than {FEWEST_ROUNDS} good rounds"
        found.append(f"{said}: too few to say whether they are faster or slower.")
    if max((row.good_rounds for row in measured), default=0) > 1 and not interleaved(rows):
        found.append("The rounds were not interleaved: what else the machine did may have favoured some cells.")
    return found


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
