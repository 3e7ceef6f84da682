"""Whoever drops a run gets its memory back: no hook, cache or cycle keeps its weights alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.planner.grid import Cell, config_of, microbatches

LAYOUTS = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "1f1b")


def alive(cells: Sequence[Cell], folder: Path) -> dict[str, list[str]]:
    """Return by cell the weights that are alive when its run of one step has been dropped."""
    kept: dict[str, list[str]] = {}
    for cell in cells:
        cfg = config_of(cell, folder)
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh)
        weights = {name: weakref.ref(p) for name, p in job.pm.named_parameters()}
        assert weights
        training_step(job, microbatches(cfg, mesh), mesh, cfg.optimizer.max_grad_norm)
        del mesh, job
        gc.collect()
        kept[cell.id] = [name for name, reference in weights.items() if reference() is not None]
    return kept


@pytest.mark.parametrize("variant", ["", "copies"])
def test_the_weights_of_a_dropped_run_are_freed(variant, tmp_path):
    cells = [
        Cell("llama", layout, "full", 2, 64, 1, 4, "none", "bfloat16", variant=variant)
        for layout in LAYOUTS
        if not (variant and layout == "fsdp1")
    ]
    for kept in run_ranks(2, alive, cells, tmp_path):
        assert not {cell: names for cell, names in kept.items() if names}
