"""Every layout computes what one process computes; the fast subset of the matrix (the whole of it: `make parity`)."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import run_ranks
from tests.parity.cells import ALL, FAST
from tests.parity.harness import Cell, Outcome, compare, run_cell, verdict


@cache
def reference(cell: Cell) -> Outcome:
    (outcome,) = run_ranks(1, run_cell, cell)
    return outcome


@pytest.mark.parametrize("cell", FAST, ids=lambda cell: cell.id)
def test_equals_one_process(cell: Cell):
    outcomes = run_ranks(cell.nproc, run_cell, cell)
    errors = compare(outcomes[0], reference(cell.reference()))
    assert not verdict(errors), errors
    for other in outcomes[1:]:  # what is global must be so on every rank
        assert (other.losses, other.norms, other.eval_loss) == (
            outcomes[0].losses,
            outcomes[0].norms,
            outcomes[0].eval_loss,
        )


def test_fast_subset_covers_every_pair_and_is_part_of_the_matrix():
    plain = [cell for cell in ALL if not cell.variant]
    for one, other in (("family", "layout"), ("family", "mode"), ("layout", "mode")):
        pairs = {(getattr(cell, one), getattr(cell, other)) for cell in plain}
        assert {(getattr(cell, one), getattr(cell, other)) for cell in FAST} >= pairs
    assert {cell.variant for cell in FAST} == {cell.variant for cell in ALL}
    assert set(FAST) <= set(ALL)
    assert len({cell.id for cell in ALL}) == len(ALL)
