"""The top of a report: the best cells of each group, and the limits of the figures."""

from collections.abc import Sequence

from shardwise.base.records.cell import MOST_OF_OTHERS, Round
from shardwise.base.words import counted, listed, number, one_line, percent, ratio, size
from shardwise.lab.report.tables import Row, candidates, environments, interleaved

FEWEST_ROUNDS = 3
"""The good rounds that a cell needs before it is ranked by speed."""
SAME_MEMORY = 0.005
"""The difference, as a share, below which two peaks of memory count as equal."""
NO_COMPARISON = "fewer than two cells to compare"


def fastest(cells: Sequence[Row]) -> tuple[str, str]:
    """Return the name of the fastest cell of a group and its speed, or no name and the reason.

    Cells whose rounds overlap with those of the fastest are named too, since any of them may be the
    fastest.
    """
    if not any(row.plan.timed for row in cells):
        return "", "not timed"
    timed = [row for row in candidates(cells) if row.tokens_per_second]
    ranked = [row for row in timed if row.num_good_rounds >= FEWEST_ROUNDS]
    if len(timed) < 2:
        return "", NO_COMPARISON
    if len(ranked) < 2:
        return "", f"not known, as it takes {FEWEST_ROUNDS} good rounds per cell"
    best = max(ranked, key=lambda row: row.tokens_per_second or 0)
    slowest_round = best.tokens_range[0] if best.tokens_range else 0.0
    overlapping = []
    for row in ranked:
        fastest_round = row.tokens_range[1] if row.tokens_range else 0.0
        if row is not best and fastest_round >= slowest_round:
            overlapping.append(row.name)
    figure = f"{number(best.tokens_per_second)} tokens/s"
    if best.speedup and not best.is_baseline:
        figure += f", {ratio(best.speedup)} {best.relative_to['speedup']}"
    if overlapping:
        figure = f"rounds overlap; the highest median is {figure} ({best.name})"
    if len(ranked) < len(timed):
        others = counted(len(timed) - len(ranked), "cell")
        figure += f"; not ranked: {others} with fewer than {FEWEST_ROUNDS} rounds"
    return listed([best.name, *overlapping]), figure


def leanest(cells: Sequence[Row]) -> tuple[str, str]:
    """Return the names of the cells with the least memory and their peak, or none and why."""
    sized = [row for row in candidates(cells) if row.peak_memory_bytes]
    if len(sized) < 2:
        return "", NO_COMPARISON
    least = min(sized, key=lambda row: row.peak_memory_bytes or 0)
    peak = least.peak_memory_bytes or 0
    equal = [row.name for row in sized if (row.peak_memory_bytes or 0) <= peak * (1 + SAME_MEMORY)]
    if len(equal) == len(sized):
        return "all cells", size(peak)
    figure = size(peak)
    if least.saving and least.saving > SAME_MEMORY:
        figure += f", {percent(least.saving)} less than {least.relative_to['saving']}"
    return listed(equal), figure


def caveats(rows: Sequence[Row]) -> list[str]:
    """Return the limits of the figures as sentences, from where and how the cells ran."""
    ran = [row for row in rows if row.record]
    facts = environments(rows)
    sentences = []
    if facts.get("cuda") and not any(facts["cuda"]):
        sentences += _cpu_caveats(ran, facts.get("cpu_count", []))
    differing = [key for key, values in facts.items() if len(values) > 1]
    if differing:
        sentences.append(
            f"Not the same in all cells: {listed(differing, most=20)}; see where they ran, below."
        )
    num_rounds = max(
        (row.num_good_rounds for row in ran if row.measured and row.plan.timed), default=0
    )
    if num_rounds > 1 and not interleaved(rows):
        sentences.append(
            "The rounds were not interleaved, so other work on the machine may favour some cells."
        )
    return sentences + _disturbances(ran) + _notes(ran)


def _disturbances(ran: Sequence[Row]) -> list[str]:
    """Return a sentence on rounds of timed cells in which other programs were busy, if any were."""
    rounds = [
        (Round(**entry), number, row.plan.id)
        for row in ran
        if row.record and row.plan.timed
        for number, entry in enumerate(row.record.rounds, start=1)
    ]
    disturbed = [one for one in rounds if one[0].is_disturbed]
    if not disturbed:
        return []
    worst, number, cell = max(disturbed, key=lambda one: one[0].others_share or 0.0)
    return [
        f"Other programs took more than {percent(MOST_OF_OTHERS)} of the machine's CPU time in "
        f"{len(disturbed)} of {counted(len(rounds), 'round')}, {percent(worst.others_share or 0)} "
        f"in round {number} of {cell}. Such rounds may be slower than on an idle machine; "
        "shardwise bench --rerun repeats cells."
    ]


def _cpu_caveats(ran: Sequence[Row], cpu_counts: Sequence[object]) -> list[str]:
    """Return what figures that were measured on CPU cores do not show."""
    sentences = ["The figures were measured on CPU cores. They do not show how fast a GPU is."]
    most = max((row.plan.nproc for row in ran), default=1)
    most_timed = max((row.plan.nproc for row in ran if row.plan.timed), default=1)
    if most > 1:
        sentences.append(
            "The processes communicated through gloo on one machine. The figures do not show how "
            "fast NCCL or a network is."
        )
    num_cores = min(
        (count for count in cpu_counts if count and isinstance(count, int)), default=most
    )
    if most_timed > num_cores:
        sentences.append(
            f"Up to {most_timed} processes shared {num_cores} cores. The speeds of those cells are "
            "those of an overloaded machine."
        )
    return sentences


def _notes(ran: Sequence[Row]) -> list[str]:
    """Return the notes of the records, once each, with the cells that have them unless all do."""
    cells_of: dict[str, list[str]] = {}
    for row in ran:
        for note in row.record.notes if row.record else []:
            cells_of.setdefault(note, []).append(row.plan.id)
    lines = []
    for note, cells in cells_of.items():
        line = note if len(cells) == len(ran) else f"{listed(cells)}: {note}"
        lines.append(one_line(line, 400))
    return lines
