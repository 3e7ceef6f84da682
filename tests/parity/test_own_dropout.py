"""Dropout that a model has by itself: the same masks under every layout, and in layers that are
computed again."""

from __future__ import annotations

import json

import pytest

from tests.distributed import run_ranks
from tests.parity import harness
from tests.parity.harness import CONFIGS, Cell, compare, run_cell, verdict


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "tp", "tp-sp"])
def test_gpt2_drops_the_same_under_every_layout(layout, tmp_path, monkeypatch):
    config = json.loads((CONFIGS / "tiny-gpt2" / "config.json").read_text()) | {
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (without,) = run_ranks(1, run_cell, Cell("gpt2", "single", "full"))
    monkeypatch.setitem(harness.FAMILIES, "gpt2", str(tmp_path))
    cell = Cell("gpt2", layout, "full", 2, "checkpointing")
    (reference,) = run_ranks(1, run_cell, cell.reference())
    errors = compare(run_ranks(2, run_cell, cell), reference)
    assert not verdict(errors), errors
    assert compare([reference], without)["grad"] > 0.1  # dropout does something
