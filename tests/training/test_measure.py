from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.planner.collectives import Collectives, predicted_bytes, targets_on_rank
from shardwise.planner.communication import unknown
from shardwise.training.measure import Memory, measure_memory
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
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
    some_now(
        [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)],
        [("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)],
    ),
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


def _predicted(cell: Cell) -> tuple[int | None, int | None]:
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    # Pipelines make stages ready in the first step, ddp agrees upon its buckets in two.
    for step in (1, 2, 3):
        batches = microbatches(cfg, mesh, step)
        with Collectives(mesh) as collectives:
            training_step(job, batches, mesh, 1.0)
    num_targets = targets_on_rank(job, batches)
    return collectives.sent_bytes, predicted_bytes(cfg, job, mesh, num_targets)


@pytest.mark.parametrize(
    "cell",
    [Cell("llama", "tp", "lora", 2), Cell("qwen3_5_text", "pp", "lora", 2, schedule="1f1b")],
    ids=str,
)
def test_the_bytes_that_leave_a_rank_are_those_of_the_formulas(cell):
    for counted, predicted in run_ranks(cell.nproc, _predicted, cell):
        assert counted == predicted > 0


@pytest.mark.parametrize(
    ("parallel", "training", "is_known_there"),
    [
        ({"tp": 2}, {"loss": "chunked"}, True),
        ({"tp": 2}, {"loss": "plain"}, False),
        ({"data": "fsdp2"}, {"loss": "plain"}, True),
        ({"data": "fsdp2"}, {"matmul": "fp8_rowwise"}, True),
        ({"cp": 2}, {"matmul": "fp8_rowwise"}, False),
    ],
)
def test_where_the_formulas_do_not_know_all_they_say_so(parallel, training, is_known_there):
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, parallel=replace(cfg.parallel, **parallel))
    cfg = replace(cfg, training=replace(cfg.training, **training))
    assert (unknown(cfg) is None) == is_known_there


def test_one_process_sends_nothing():
    assert run_ranks(1, _predicted, Cell("llama", "single", "lora")) == [(0, 0)]


def _with_a_broadcast() -> tuple[int | None, set[str]]:
    mesh = build_mesh(run_config(Cell("llama", "ddp", "lora", 2)), torch.device("cpu"))
    with Collectives(mesh) as collectives:
        dist.all_reduce(torch.ones(3), group=mesh.group("dp_replicate"))
        before = collectives.sent_bytes
        dist.broadcast(torch.ones(3), 0)
    assert collectives.sent_bytes is None
    return before, {name.partition(" ")[0] for name in collectives.uncounted}


def test_a_collective_of_an_unknown_kind_is_no_number():
    # Of 12 bytes 2 (n - 1) / n = 1 leave each of 2 ranks.
    assert run_ranks(2, _with_a_broadcast) == [(12, {"broadcast_"})] * 2
