"""Cells that the same forked processes run, one after another: the first step of a process takes
longest."""

from __future__ import annotations

from collections.abc import Iterable

from tests.distributed import run_ranks
from tests.parity.harness import Cell, Outcome, run_cell


def groups(cells: Iterable[Cell], most: int) -> list[tuple[Cell, ...]]:
    """Return the cells in groups of at most `most` that can share processes.

    A group has cells of as many processes and of alike layouts; one that compiles is alone.
    """
    by_number: dict[tuple[int, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.layout):
        alone = cell.id if cell.variant.endswith("compile") else ""
        by_number.setdefault((cell.nproc, alone), []).append(cell)
    return [
        tuple(alike[i : i + most])
        for alike in by_number.values()
        for i in range(0, len(alike), most)
    ]


def run_together(group: tuple[Cell, ...]) -> dict[Cell, tuple[Outcome, ...]]:
    """Run the cells of a group; return what each rank computed, by cell."""
    return dict(zip(group, zip(*run_ranks(group[0].nproc, _run_each, group)), strict=True))


def _run_each(cells: tuple[Cell, ...]) -> list[Outcome]:
    outcomes = []
    for cell in cells:
        try:
            outcomes.append(run_cell(cell))
        except Exception as error:
            error.add_note(
                f"in {cell.id}, which runs in the processes of {[cell.id for cell in cells]}"
            )
            raise
    return outcomes
