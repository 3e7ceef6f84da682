"""AdamW updates shards as it updates whole weights: the other cells have SGD, which hides less."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.parity.harness import ADAMW, TOLERANCE, Cell, compare, run_cell, verdict
from tests.parity.references import reference

CELLS = [
    Cell("llama", "zero1-tp", "full", 4, ADAMW),  # zero has the second dim, so shards are strided
    Cell("qwen3_5_text", "pp-zero1", "lora", 4, ADAMW, "1f1b"),
    Cell("qwen3_5_text", "zero2", "lora", 2, ADAMW),
    Cell("qwen3_5_text", "fsdp2", "full", 2, ADAMW),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_updates_are_those_of_one_process(cell):
    errors = compare(run_ranks(cell.nproc, run_cell, cell), reference(cell.reference()))
    assert not verdict(errors, TOLERANCE), errors
