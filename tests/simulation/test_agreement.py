"""The peak of a rank by formulas beside that of a simulated step."""

from __future__ import annotations

import pytest

from shardwise.assembly.describe import describe
from shardwise.planner.peak import boundaries_of, memory_of_rank
from shardwise.simulation.simulate import simulate
from tests.planner.grid import Cell, config_of

CELLS = [
    Cell("llama", "ddp", "lora", 2, 128, 2, 2, "none", "float32"),
    Cell("llama", "tp", "full", 2, 128, 2, 1, "none", "float32"),
    Cell("qwen3_5", "zero1", "lora", 2, 128, 2, 1, "operators", "float32"),
    Cell("qwen3_5", "1f1b", "lora", 2, 128, 2, 4, "none", "float32"),
    Cell("falcon_h1", "fsdp2", "full", 2, 128, 2, 1, "full", "float32"),
    Cell("falcon_h1", "ddp", "full", 2, 128, 2, 1, "none", "float32"),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_formulas_and_simulation_agree(cell, tmp_path):
    cfg = config_of(cell, tmp_path)
    run = describe(cfg, cell.num_ranks)
    simulated = simulate(cfg, cell.num_ranks, 0)
    first = dict.fromkeys(run.sizes, 0)
    memory = memory_of_rank(cfg, run, first, boundaries_of(cfg, run))
    assert memory.total == pytest.approx(simulated.peak_bytes, rel=0.03), (memory, simulated)
