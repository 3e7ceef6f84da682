"""Model types that no family lists: a few steps on two processes equal one process, as for the
listed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.layouts import NAMES
from tests.distributed import run_ranks
from tests.models.unproven import write_config
from tests.parity import harness
from tests.parity.harness import Cell, compare, run_cell, verdict

CELLS = (
    Cell("mistral", "ddp", "lora", 2),
    Cell("mistral", "fsdp1", "lora", 2),
    Cell("mistral", "zero1", "full", 2),
    Cell("olmo3", "zero2", "full", 2),
    Cell("granite", "hsdp", "lora", 2),
    Cell("granite", "fsdp2", "lora", 2, "checkpointing"),
    Cell("gemma3_text", "fsdp2", "full", 2),
    Cell("olmoe", "ddp", "full", 2),
    Cell("minimax", "fsdp2", "full", 2),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_equals_one_process(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(harness.FAMILIES, cell.family, str(write_config(cell.family, tmp_path)))
    (reference,) = run_ranks(1, run_cell, cell.reference())
    errors = compare(run_ranks(cell.nproc, run_cell, cell), reference)
    assert not verdict(errors), errors


def test_every_layout_that_is_offered_is_tried():
    unlisted = [name for name in NAMES if not {"pp", "cp", "ep", "tp"} & set(name.split("-"))]
    assert {cell.layout for cell in CELLS} == {*unlisted} - {"single"}
