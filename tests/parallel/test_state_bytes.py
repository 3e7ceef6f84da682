"""Bytes that each rank holds, against a closed formula: 0 bytes off, for each strategy, LoRA and full."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.metrics.memory import state_bytes
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import shard_dim
from shardwise.training.build import build
from shardwise.training.gradients import clip_by_global_norm
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config


@dataclass(frozen=True)
class Measured:
    """One rank after a step, its gradients still there, and the sizes that the formula needs."""

    state: dict[str, int]
    shapes: list[tuple[tuple[int, ...], int, bool]]  # global shape, bytes per element, trainable
    reduce_scattered: int  # elements given to reduce-scatter in the backward


def measure(cell: Cell) -> Measured:
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    elements = []
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # torch 2.13
    reduce_scatter = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        elements.append(kwargs["input"].numel())
        return reduce_scatter(*args, **kwargs)

    setattr(dist, name, counting)  # this process ends with the measurement
    forward_backward(job.pm, microbatches(cfg, mesh, 1)[:1], mesh)
    clip_by_global_norm(job.trainable(), mesh, 1.0)
    job.optimizer.step()
    named = list(job.pm.named_parameters())
    shapes = [(tuple(p.shape), p.element_size(), p.requires_grad) for _, p in named]
    return Measured(state_bytes([p for _, p in named], job.optimizer), shapes, sum(elements))


def expected(measured: Measured, num_shards: int, rank_in_shards: int) -> dict[str, int]:
    """Weights: every parameter's share, rounded up to whole rows; gradients: the same of what is trained; AdamW: two
    moments of what this rank really holds of that, and a 4-byte step counter per parameter."""
    result = {"weights": 0, "gradients": 0, "optimizer": 0}
    for shape, size, trainable in measured.shapes:
        dim = shard_dim(shape, num_shards)
        row = prod(shape) // shape[dim]
        rows = -(-shape[dim] // num_shards)
        held = max(0, min(rows, shape[dim] - rank_in_shards * rows))
        result["weights"] += rows * row * size
        if trainable:
            result["gradients"] += rows * row * size
            result["optimizer"] += 2 * held * row * size + 4
    return result


CELLS = [
    Cell("qwen3_5_text", layout, mode, nproc)
    for layout, nproc in (("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4))
    for mode in ("lora", "full")
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_state_bytes_equal_the_formula(cell, capsys):
    num_shards = {"fsdp2": cell.nproc, "hsdp": cell.nproc // 2}.get(cell.layout, 1)
    measured = run_ranks(cell.nproc, measure, cell)
    for rank, one in enumerate(measured):
        assert one.state == expected(one, num_shards, rank % num_shards), f"rank {rank}"
    with capsys.disabled():
        row = measured[0].state
        print(f"\n{cell.id:28} " + " ".join(f"{key} {value:>9,} B" for key, value in row.items()), end="")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_frozen_weights_are_not_reduce_scattered(mode):
    for one in run_ranks(2, measure, Cell("qwen3_5_text", "fsdp2", mode, 2)):
        trained = sum(
            2 * -(-shape[shard_dim(shape, 2)] // 2) * (prod(shape) // shape[shard_dim(shape, 2)])
            for shape, _, trainable in one.shapes
            if trainable
        )
        assert one.reduce_scattered == trained > 0
