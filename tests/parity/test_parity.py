"""Every layout computes what one process computes; the fast subset of the matrix (the whole of it: `make parity`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from shardwise.parallel.compose import COMPATIBLE, WITH_TENSOR, proofs
from shardwise.parallel.compose import LAYOUTS as PROVEN
from shardwise.schedule.orders import ORDERS
from tests.distributed import run_ranks
from tests.parity.cells import ALL, FAST, LAYOUTS, pairs
from tests.parity.harness import FAMILIES, TOLERANCE, Cell, Outcome, compare, control, run_cell, tolerance, verdict

ROOT = Path(__file__).parents[2]


@cache
def reference(cell: Cell) -> Outcome:
    (outcome,) = run_ranks(1, run_cell, cell)
    return outcome


def together(cell: Cell) -> tuple[str, int]:
    """What cells have in common that the same processes run where they are 8: their first step takes longest."""
    return (cell.layout.removesuffix("-sp"), cell.nproc) if cell.nproc == 8 else (cell.id, cell.nproc)


@cache
def outcomes_together(group: tuple[str, int]) -> dict[Cell, tuple[Outcome, ...]]:
    """By cell of a group: what each rank saw."""
    cells = [cell for cell in FAST if together(cell) == group]
    return dict(zip(cells, zip(*run_ranks(group[-1], run_each, cells)), strict=True))


def run_each(cells: list[Cell]) -> list[Outcome]:
    return [run_cell(cell) for cell in cells]


@pytest.mark.parametrize("cell", FAST, ids=lambda cell: cell.id)
def test_equals_one_process(cell: Cell):
    outcomes = outcomes_together(together(cell))[cell]
    expected = reference(cell.reference())
    errors = compare(outcomes, expected)
    float32 = control(cell)
    most = tolerance(expected, reference(float32)) if float32 else TOLERANCE
    assert not verdict(errors, most), (errors, most)
    for other in outcomes[1:]:  # what is global must be so on every rank
        assert (other.losses, other.norms, other.eval_loss) == (
            outcomes[0].losses,
            outcomes[0].norms,
            outcomes[0].eval_loss,
        )


def test_fast_subset_covers_every_pair_and_is_part_of_the_matrix():
    assert set().union(*map(pairs, FAST)) == set().union(*map(pairs, ALL))
    in_pipelines = [layout for layout in PROVEN if layout.startswith("pp") and layout not in WITH_TENSOR]
    pipelines = len(FAMILIES) + 2 * len(ORDERS) + 4 * len(in_pipelines)
    tensors = len(FAMILIES) + len(WITH_TENSOR) + 4
    without = 4 * len(FAMILIES) + 2 * len(LAYOUTS)
    assert len({pair for cell in ALL for pair in pairs(cell)}) == without + pipelines + tensors
    assert {cell.variant for cell in FAST} == {cell.variant for cell in ALL}
    assert set(FAST) <= set(ALL)
    assert len({cell.id for cell in ALL}) == len(ALL)


def called_proofs() -> dict[str, tuple[str, str, str]]:
    """The two cells by which each layout of each family is said to be proven: by id what they are of."""
    return {
        test.replace("{lora,full}", mode): (family, layout, mode)
        for family in COMPATIBLE
        for layout, test in proofs(family).items()
        for mode in ("lora", "full")
        if layout != "single"
    }


def test_what_is_called_a_proof_is_a_plain_cell():
    """`shardwise models` and docs/reference/compatibility.md say it of all that compose.COMPATIBLE offers."""
    cells = {cell.id: cell for cell in ALL}
    for test, (family, layout, mode) in called_proofs().items():
        cell = cells[test]
        # On 2 ranks of each axis at least, nothing but the layout differs from one process.
        assert cell.nproc >= 2 ** len(layout.removesuffix("-sp").split("-")), test
        plain = Cell(family, layout, mode, cell.nproc, schedule="1f1b" if layout.startswith("pp") else "")
        assert cell == plain, test
    offered = [(family, layout) for family, layouts in COMPATIBLE.items() for layout in layouts - {"single"}]
    assert len(called_proofs()) == 2 * len(offered)


def test_what_is_called_proven_has_a_result():
    """results/parity.json is what the whole matrix came to."""
    cells = json.loads((ROOT / "results" / "parity.json").read_text())["cells"]
    assert {cell["status"] for cell in cells} == {"ok"}
    assert set(called_proofs()) <= {cell["id"] for cell in cells}
