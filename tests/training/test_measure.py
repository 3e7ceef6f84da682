from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.planner.collectives import predicted_bytes
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


SENDING = (
    *(Cell("llama", layout, "lora", 2) for layout in ("ddp", "fsdp2", "tp")),
    Cell("llama", "pp", "lora", 2, schedule="1f1b"),
    Cell("qwen3_5_text", "cp", "lora", 2),
    Cell("qwen3_moe", "zero2", "lora", 2),  # whose loads are summed
)


def _sent(cell: Cell) -> tuple[list[int] | None, int | None]:
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    # Pipelines make stages ready in the first step, ddp agrees upon its buckets in two.
    for step in (1, 2, 3) if cell.layout in ("ddp", "pp") else (3,):
        batches = microbatches(cfg, mesh, step)
        memory = measure_memory(job, batches, mesh, cfg)
        job.optimizer.zero_grad()
    return memory.sent_bytes, predicted_bytes(cfg, job, mesh, batches)


@pytest.mark.parametrize("cell", SENDING, ids=str)
def test_the_bytes_that_are_counted_are_those_of_the_formulas(cell):
    ranks = run_ranks(cell.nproc, _sent, cell)
    predicted = [of_rank for _, of_rank in ranks]
    assert min(predicted) > 0
    assert [counted for counted, _ in ranks] == [predicted] * cell.nproc


def test_one_process_sends_nothing():
    ((counted, predicted),) = run_ranks(1, _sent, Cell("llama", "single", "lora"))
    assert (counted, predicted) == ([0], 0)
