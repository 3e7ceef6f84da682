"""Data-parallel strategies on a mesh with `cp`: they need to know nothing of context parallelism.

Here context parallelism is left out: two ranks along `cp` compute the same rows, but each has the
loss of every other token only. So both have partial sums of losses and gradients, as with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import Mesh
from shardwise.config import RunConfig
from shardwise.lab.proof import harness as proof_harness
from shardwise.parallel.mesh import context_joins_of
from tests.distributed import run_ranks
from tests.parity import harness
from tests.parity.harness import Cell, Outcome, compare, run_cell, verdict
from tests.parity.references import reference

Sizes = tuple[int, int, int, int, int]
CASES: dict[Cell, Sizes] = {
    Cell("qwen3_5_text", "ddp", "full", 4): (1, 2, 1, 2, 1),
    Cell("llama", "zero1", "full", 4): (1, 2, 1, 2, 1),
    Cell("llama", "zero2", "lora", 4): (1, 2, 1, 2, 1),
    Cell("llama", "fsdp1", "lora", 4): (1, 1, 2, 2, 1),
    Cell("qwen3_5_text", "fsdp2", "full", 4): (1, 1, 2, 2, 1),
    Cell("llama", "hsdp", "full", 4): (1, 2, 1, 2, 1),
    Cell("llama", "ddp-tp", "full", 4): (1, 1, 1, 2, 2),
    Cell("llama", "zero1-tp", "full", 4): (1, 1, 1, 2, 2),
    Cell("llama", "fsdp2-tp", "full", 4): (1, 1, 1, 2, 2),
    Cell("llama", "pp-ddp", "full", 4, schedule="1f1b"): (2, 1, 1, 2, 1),
}
"""Cells of four ranks, and the sizes of the axes of the mesh that takes the place of theirs."""
KEPT = ("zero2",)
"""What `make test` runs: gradients summed in buckets.

`make parity` runs the others, which ask the mesh for the same joined axes
(tests/parallel/test_mesh.py), and which cells of parity run with `cp` itself: beside fsdp2, beside
tp and beside stages.
"""


def _with_context(cell: Cell, sizes: Sizes) -> Outcome:
    def mesh_of(cfg: RunConfig, device: torch.device) -> Mesh:
        dense = init_device_mesh("cpu", sizes, mesh_dim_names=Mesh.AXES)
        return Mesh(dense, device, context_joins_of(cfg))

    build = proof_harness.build

    def build_with_context(cfg: RunConfig, mesh: Mesh, state: Any) -> Any:
        job = build(cfg, mesh, state)

        def every_other_target(batch: Batch) -> Batch:
            labels = torch.full_like(batch.labels, IGNORED)
            labels[:, mesh.rank("cp") :: 2] = batch.labels[:, mesh.rank("cp") :: 2]
            return replace(batch, labels=labels)

        return replace(job, pm=replace(job.pm, shard_batch=(every_other_target,)))

    harness.build_mesh, proof_harness.build = mesh_of, build_with_context
    return run_cell(cell)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] * (cell.layout not in KEPT))
        for cell in CASES
    ],
)
def test_losses_and_gradients_add_up_over_data_and_context(cell):
    outcomes = run_ranks(cell.nproc, _with_context, cell, CASES[cell])
    assert verdict(compare(outcomes, reference(cell.reference()))) == []


def test_sums_over_data_alone_are_wrong(monkeypatch):
    monkeypatch.setattr(Mesh, "_with_context", lambda self, axis: axis)
    cell = Cell("llama", "zero2", "lora", 4)
    errors = compare(run_ranks(4, _with_context, cell, CASES[cell]), reference(cell.reference()))
    assert min(errors["loss"], errors["grad"], errors["norm"]) > 0.01
