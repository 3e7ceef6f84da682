"""A simulated step has the peak of the real one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.config import RunConfig, UserError
from shardwise.lab.planner.peak import memory_of_run
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.measure import measure_memory
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.oracles import simulate as module
from tests.oracles.simulate import full_batches, simulate
from tests.parity.harness import Cell, run_config


def config(cell: Cell) -> RunConfig:
    cfg = run_config(cell, optimizer="adamw")
    rows = 4 * cell.nproc
    return replace(
        cfg,
        data=replace(cfg.data, sequence_length=64),
        training=replace(cfg.training, micro_batch_size=2, global_batch_size=rows),
    )


def measure(cfg: RunConfig) -> tuple[int, dict[str, int]]:
    """The real peak of this rank's step, and its parts: the least of three steps after the first.

    gloo frees its buffers in threads of its own, on a busy machine so late that a step holds one
    buffer more (see PeakMemory). It never makes a peak smaller.
    """
    with PeakMemory(torch.device("cpu")) as inherited:
        pass
    assert inherited.entry_bytes is not None
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    batches = full_batches(cfg, mesh, job)
    training_step(job, [batch.to(mesh.device) for batch in batches], mesh, 1.0)
    rank, measured = dist.get_rank(), []
    for _ in range(3):
        memory = measure_memory(job, batches, mesh, cfg)
        measured.append((memory.peak_bytes[rank], memory.parts[rank]))
    peak_bytes, parts = min(measured, key=lambda one: one[0])
    return peak_bytes - inherited.entry_bytes, parts


PEAKS = (
    (Cell("llama", "single", "lora", 1, variant="checkpointing"), 1e-4),
    (Cell("llama", "fsdp2", "lora", 2), 1e-3),
    # Messages of a few numbers stay in gloo's threads: two real steps differ by 512 bytes.
    (Cell("llama", "tp", "lora", 2), 1e-3),
)
"""Cells, and how far a peak may be off; of one process, of shards, and of shares of layers."""
LATER = (
    # Some kernels of torch take memory of their own on a CPU.
    (Cell("qwen3_5_text", "single", "lora", 1), 0.02),
    (Cell("llama", "zero2", "full", 2), 1e-4),
    (Cell("llama", "ddp", "lora", 2), 1e-4),
    (Cell("llama", "pp", "lora", 2, schedule="1f1b"), 1e-3),
)


@pytest.mark.parametrize(
    ("cell", "most"),
    some_now((*PEAKS, *LATER), PEAKS),
    ids=lambda cell: cell.id if isinstance(cell, Cell) else None,
)
def test_the_peak_of_a_step(cell, most):
    cfg, rank = config(cell), cell.nproc - 1
    peak_bytes, parts = run_ranks(cell.nproc, measure, cfg)[rank]
    simulated = simulate(cfg, cell.nproc, rank)
    assert simulated.peak_bytes == pytest.approx(peak_bytes, rel=most)
    assert sum(simulated.parts.values()) == simulated.peak_bytes
    for part in ("weights", "gradients", "optimizer"):
        assert simulated.parts[part] == parts[part]


def test_a_simulation_says_when_the_peak_is_and_leaves_the_caller_as_it_was():
    cell = Cell("llama", "single", "lora", 1, variant="checkpointing")
    simulated = simulate(config(cell), 1, 0)
    # Of a checkpointed model it is where the backward has computed a layer again.
    assert simulated.moment.startswith("recomputed forward of model.layers.")
    assert simulated.seconds > 0
    assert not dist.is_initialized()
    assert "resize_" not in vars(torch.UntypedStorage)


def test_experts_are_spread_over_ranks_and_chosen_evenly():
    cfg = config(Cell("qwen3_moe", "fsdp2-ep", "lora", 2))
    assert simulate(cfg, 2, 0).peak_bytes == simulate(cfg, 2, 1).peak_bytes


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"training.compile": "aot_eager"}, "training.compile"),
        ({"parallel.data": "fsdp1"}, "fsdp1"),
        ({"parallel.data": "fsdp2", "parallel.offload": "all"}, "parallel.offload"),
    ],
)
def test_what_cannot_be_simulated(change, fragment):
    cfg = config(Cell("llama", "single", "lora", 1))
    for key, value in change.items():
        section, name = key.split(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: value})})
    with pytest.raises(UserError, match=f"{fragment}.*; go by the formulas"):
        simulate(cfg, 2, 0)


@pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2"))]
)
def test_micro_batches_between_the_first_and_the_last_are_alike(layout, monkeypatch):
    cfg = config(Cell("llama", layout, "full", 2))
    cfg = replace(cfg, training=replace(cfg.training, micro_batch_size=1, global_batch_size=12))
    some = simulate(cfg, 2, 0)
    monkeypatch.setattr(module, "UNLIKE", 6)
    every = simulate(cfg, 2, 0)
    assert (some.peak_bytes, some.parts) == (every.peak_bytes, every.parts)
    monkeypatch.setattr(module, "UNLIKE", 1)
    assert simulate(cfg, 2, 0).peak_bytes < every.peak_bytes  # it finds no gradients


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_micro_batches_beyond_those_that_fill_a_pipeline_leave_only_their_losses(rank, monkeypatch):
    cfg = config(Cell("llama", "pp", "full", 2, schedule="1f1b"))
    training = replace(cfg.training, micro_batch_size=1, global_batch_size=10, device="cpu")
    cfg = replace(cfg, training=training)
    some = simulate(cfg, 2, rank)
    monkeypatch.setattr(module, "ALIKE", 10)
    assert 0 < simulate(cfg, 2, rank).peak_bytes - some.peak_bytes <= 16 * 10


def test_a_rank_that_is_not_there_and_a_run_that_may_not_begin():
    cfg = config(Cell("llama", "single", "lora", 1))
    with pytest.raises(UserError, match="no rank 1"):
        simulate(cfg, 1, 1)
    with pytest.raises(UserError, match="tp"):
        simulate(replace(cfg, parallel=replace(cfg.parallel, tp=3)), 3, 0)


@pytest.mark.parametrize("is_freed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_weights_that_stay_gathered_are_in_the_planned_peak(is_freed):
    cfg = config(Cell("llama", "fsdp2", "lora", 2))
    cfg = replace(
        cfg,
        data=replace(cfg.data, sequence_length=16),
        parallel=replace(cfg.parallel, reshard_after_forward=is_freed),
        training=replace(cfg.training, device="cpu", checkpointing="full"),
    )
    planned = memory_of_run(cfg, describe(cfg, 2))
    assert planned.total == pytest.approx(simulate(cfg, 2, 0).peak_bytes, rel=0.03)
