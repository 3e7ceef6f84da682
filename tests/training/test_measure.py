from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.training.measure import Memory, measure_memory
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config


def _measure(cell: Cell) -> Memory:
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    for step in (1, 2):  # AdamW has no state before its first step
        memory = measure_memory(job, microbatches(cfg, mesh, step), mesh, cfg)
        job.optimizer.zero_grad()
    return memory


GRADIENTS = {"ddp": 2}
"""How often the peak holds the gradients of `state_bytes`, where that is not once.

ddp: the last micro-batch fills buckets, and the gradients of those before it are beside them.
zero1 has freed the complete gradients when it has their shards.
"""


@pytest.mark.parametrize(
    ("layout", "nproc"),
    [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)],
)
def test_parts_of_the_peak(layout, nproc):
    for memory in run_ranks(nproc, _measure, Cell("llama", layout, "full", nproc)):
        for peak, parts, state in zip(
            memory.peak_bytes, memory.parts, memory.state_bytes, strict=True
        ):
            assert sum(parts.values()) == peak
            assert parts["weights"] == state["weights"]
            assert parts["optimizer"] == state["optimizer"]
            assert parts["gradients"] == GRADIENTS.get(layout, 1) * state["gradients"]


def test_checkpointing_lowers_the_activations():
    cell = Cell("llama", "single", "full")
    (plain,), (kept,) = (
        run_ranks(1, _measure, replace(cell, variant=v)) for v in ("", "checkpointing")
    )
    (before,), (after,) = plain.parts, kept.parts
    # Of four layers' activations their inputs are left, and what head and loss keep.
    assert after["activations"] < 0.5 * before["activations"]
    assert after["weights"] == before["weights"]
