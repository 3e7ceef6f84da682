"""No uninitialised memory reaches a matrix product: a step of several families and layouts, with an
odd vocabulary."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS, FAMILIES, Cell, DrawnStart, microbatches, run_config
from tests.uninitialised import filled_with_nan

VOCABULARY = 261
"""No multiple of 16 or 32, nor is a rank's share of it: 131 and 130."""
CELLS = (
    *(
        Cell(family, "single", "full")
        for family in ("gpt2", "qwen3_next", "nemotron_h", "lfm2", "kimi_linear", "jamba")
    ),
    Cell("qwen3_next", "tp-sp", "lora", 2),
    Cell("llama", "pp", "full", 2, schedule="1f1b"),
    Cell("olmo_hybrid", "fsdp1", "lora", 2),
)


def one_step(cell: Cell, folder: str) -> tuple[int, list[str], float]:
    """Products of a step in bfloat16, those that were handed NaN, and the loss plus the norm."""
    cfg = run_config(cell)
    cfg = replace(
        cfg,
        model=replace(cfg.model, path=folder),
        training=replace(cfg.training, precision="bfloat16"),
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    with filled_with_nan() as products:
        job = build(cfg, mesh, DrawnStart())
        result = training_step(job, microbatches(cfg, mesh, 1), mesh, max_grad_norm=1.0)
    return products.count, products.poisoned, result.loss + result.grad_norm


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_products_are_handed_only_what_was_written(cell, tmp_path):
    config = json.loads((CONFIGS / FAMILIES[cell.family] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    for count, poisoned, value in run_ranks(cell.nproc, one_step, cell, str(tmp_path)):
        assert count > 50  # that they are seen at all
        assert poisoned == []
        assert math.isfinite(value)
