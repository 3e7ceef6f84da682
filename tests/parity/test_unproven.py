"""Model types that no family lists: a few steps on two processes equal one process, as for the
listed ones."""

from __future__ import annotations

import pytest

from shardwise.base.layouts import layout_names
from tests.models.unproven import write_config
from tests.parity import harness
from tests.parity.harness import Cell, Outcome, compare, verdict
from tests.parity.together import run_together

CELLS = (
    Cell("ministral", "ddp", "lora", 2),
    Cell("ministral", "fsdp1", "lora", 2),
    Cell("ministral", "zero1", "full", 2),
    Cell("ministral", "zero2", "full", 2),
    Cell("hyperclovax", "hsdp", "lora", 2),
    Cell("hyperclovax", "fsdp2", "lora", 2, "checkpointing"),
    Cell("vaultgemma", "fsdp2", "full", 2),
    Cell("olmoe", "ddp", "full", 2),
    Cell("minimax", "fsdp2", "full", 2),
    Cell("vaultgemma", "zero1", "full", 2),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, tuple[Outcome, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        for family in {cell.family for cell in CELLS}:
            folder = write_config(family, tmp_path_factory.mktemp(family))
            patch.setitem(harness.FAMILIES, family, str(folder))
        references = tuple(dict.fromkeys(cell.reference() for cell in CELLS))
        return run_together(CELLS) | run_together(references)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_equals_one_process(cell, outcomes):
    (reference,) = outcomes[cell.reference()]
    errors = compare(outcomes[cell], reference)
    assert not verdict(errors), errors


def test_every_layout_that_is_offered_is_tried():
    others = {"pp", "cp", "ep", "tp"}
    unlisted = [name for name in layout_names() if not others & set(name.split("-"))]
    assert {cell.layout for cell in CELLS} == {*unlisted} - {"single"}
