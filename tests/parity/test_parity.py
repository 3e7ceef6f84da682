"""Every layout computes what one process computes; the fast subset of the matrix (the whole of it:
`make parity`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.schedule.orders import ORDERS
from shardwise.models.kinds import KINDS
from tests import compiling  # noqa: F401  (what forked processes then need not import)
from tests.parity.cells import ALL, FAST, LAYOUTS, QUICK, pairs
from tests.parity.harness import (
    FAMILIES,
    TOLERANCE,
    Cell,
    Outcome,
    compare,
    control,
    tolerance,
    verdict,
)
from tests.parity.layouts import PROVEN, WITH_TENSOR
from tests.parity.references import compute_together, reference
from tests.parity.together import groups, run_together

ROOT = Path(__file__).parents[2]
TOGETHER = 12
"""Cells of a group: an error in one, where a difference is expected, is that of all."""
GROUPS = {cell: group for group in groups(FAST, TOGETHER) for cell in group}


@cache
def outcomes_together(group: tuple[Cell, ...]) -> dict[Cell, tuple[Outcome, ...]]:
    """By cell of a group: what each rank saw. Their references are on disk then."""
    controls = [other.reference() for cell in group if (other := control(cell))]
    compute_together([*(cell.reference() for cell in group), *controls])
    return run_together(group)


def params() -> list[Any]:
    return [
        pytest.param(cell, id=cell.id, marks=[pytest.mark.quick] * (cell in QUICK)) for cell in FAST
    ]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> set[Cell]:
    """The cells whose tests are to run: others of their groups need not."""
    here = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    return {
        item.callspec.params["cell"]
        for item in here
        if item.originalname == "test_equals_one_process"
    }


@pytest.mark.parametrize("cell", params())
def test_equals_one_process(cell, selected):
    outcomes = outcomes_together(tuple(other for other in GROUPS[cell] if other in selected))[cell]
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
    in_pipelines = [
        layout for layout in PROVEN if layout.startswith("pp") and layout not in WITH_TENSOR
    ]
    pipelines = len(KINDS) + len(ORDERS) + 2 * len(in_pipelines)
    axes = (layout.removesuffix("-sp").split("-") for layout in WITH_TENSOR)
    beside = {two for layout in axes for two in combinations(layout, 2)}
    tensors = len(KINDS) + len(("tp", "tp-sp")) + len(beside)
    without = len(FAMILIES) + len(KINDS) + 2 * len(LAYOUTS)
    assert len({pair for cell in ALL for pair in pairs(cell)}) == without + pipelines + tensors
    # Of a variant that joins two, such as `activations-compile`, each runs, perhaps in another one.
    assert variants(FAST) == variants(ALL)
    assert set(FAST) <= set(ALL)
    assert (
        len({(cell.family, cell.layout) for cell in FAST}) >= 88
    )  # so many there were, and fewer there may not be
    assert len({cell.id for cell in ALL}) == len(ALL)


def variants(cells: Iterable[Cell]) -> set[str]:
    return {part for cell in cells for part in cell.variant.split("-")}


def proofs() -> dict[tuple[str, str, str], Cell]:
    """Return a plain cell for each family, layout that is offered, and mode: nothing but the layout
    differs."""
    plain = {}
    for cell in ALL:
        if cell.layout not in PROVEN:
            continue
        schedule = "1f1b" if cell.layout.startswith("pp") else ""
        if cell == Cell(cell.family, cell.layout, cell.mode, cell.nproc, schedule=schedule):
            plain[cell.family, cell.layout, cell.mode] = cell
    return plain


def test_every_layout_that_is_offered_has_a_plain_cell_for_every_family():
    """`shardwise models` and docs/reference/compatibility.md say so, on two ranks of each axis at
    least."""
    cells = proofs()
    layouts = [layout for layout in PROVEN if layout != "single"]
    assert set(cells) == set(product(FAMILIES, layouts, ("lora", "full")))
    for (_, layout, _), cell in cells.items():
        assert cell.nproc >= 2 ** len(layout.removesuffix("-sp").split("-")), cell.id


def test_what_is_offered_has_a_result():
    """results/parity.json is what the whole matrix came to."""
    cells = json.loads((ROOT / "results" / "parity.json").read_text())["cells"]
    assert {cell["status"] for cell in cells} == {"ok"}
    assert {cell.id for cell in proofs().values()} <= {cell["id"] for cell in cells}
    families, layouts = ({cell[key] for cell in cells} for key in ("family", "layout"))
    assert (
        f"{len(cells):,} of {len(cells):,} comparisons agree: {len(families)} families, "
        f"{len(layouts)} layouts"
    ) in (ROOT / "README.md").read_text(encoding="utf-8")
