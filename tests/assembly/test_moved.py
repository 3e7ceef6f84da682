"""Layers that move between the ranks of a running pipeline: it trains as one process does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from shardwise.assembly.build import Job, build
from shardwise.assembly.moved import MovedState
from shardwise.assembly.state import portable_tensors
from shardwise.config import Parallel, RunConfig
from shardwise.interfaces import Mesh
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.parallel.reduce import of_every_rank
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config, start

STEPS = 4


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    """Weights, buffers and optimizer states of the whole model."""


def moved(job: Job, cfg: RunConfig, mesh: Mesh, step: int, layers: Sequence[int]) -> Job:
    """Return the job with these layers in its stages."""
    edges = [0, *(1 + sum(layers[:chunk]) for chunk in range(1, len(layers))), sum(layers) + 2]
    state = MovedState(job, cfg, step)
    state.move(job, mesh, edges)
    cfg = replace(cfg, parallel=replace(cfg.parallel, split=list(layers)))
    return replace(job.rebuild(cfg, state), routing=job.routing)


def trained(cfg: RunConfig, splits: Sequence[Sequence[int]] = ()) -> Trained:
    """Train `STEPS` steps; after each of the first ones the next of `splits` holds."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    if splits:
        cfg = replace(cfg, parallel=replace(cfg.parallel, split=list(splits[0])))
    job = build(cfg, mesh, start(cfg), STEPS)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        result = training_step(job, microbatches(cfg, mesh, step), mesh, None)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step < len(splits):
            job = moved(job, cfg, mesh, step, splits[step])
    pairs = portable_tensors(job.pm, job.optimizer, trained_only=False)
    mine = {key: full_tensor(tensor).clone() for key, tensor in pairs}
    return Trained(losses, norms, {k: t for held in of_every_rank(mine) for k, t in held.items()})


PP = {"pp": 2}
CASES: dict[str, tuple[Cell, int, dict[str, Any], list[list[int]]]] = {
    "full, tied": (Cell("qwen3_5_text", "single", "full"), 2, PP, [[1, 3], [3, 1], [0, 4]]),
    "lora, sharded": (
        Cell("qwen3_next", "single", "lora"),
        4,
        {**PP, "data": "fsdp2"},
        [[1, 3], [3, 1]],
    ),
    "lora, interleaved": (
        Cell("qwen3_5_text", "single", "lora"),
        2,
        {**PP, "schedule": "interleaved-1f1b"},
        [[1, 1, 1, 1], [0, 1, 2, 1], [1, 2, 1, 0]],
    ),
    "full, replicas": (Cell("llama", "single", "full"), 4, {**PP, "data": "ddp"}, [[1, 3], [3, 1]]),
    "full, tensor": (Cell("qwen3_next", "single", "full"), 4, {**PP, "tp": 2}, [[1, 3], [3, 1]]),
    "lora, tensor": (Cell("qwen3_moe", "single", "lora"), 4, {**PP, "tp": 2}, [[1, 3], [3, 1]]),
    "experts": (Cell("qwen3_moe", "single", "full"), 4, {**PP, "data": "fsdp2"}, [[1, 3], [3, 1]]),
    "four": (
        Cell("llama", "single", "lora"),
        4,
        {"pp": 4},
        [[1, 1, 1, 1], [0, 2, 1, 1], [1, 1, 2, 0]],
    ),
    "zbv": (
        Cell("qwen3_5_text", "single", "full"),
        2,
        {**PP, "schedule": "zbv"},
        [[1, 1, 1, 1], [0, 1, 2, 1], [1, 2, 1, 0]],
    ),
    "offloaded": (
        Cell("llama", "single", "full"),
        2,
        {**PP, "offload": "optimizer"},
        [[1, 3], [3, 1]],
    ),
    "context": (Cell("qwen3_next", "single", "full"), 4, {**PP, "cp": 2}, [[1, 3], [3, 1]]),
    "nf4": (Cell("qwen3_5_text", "single", "lora", variant="nf4"), 2, PP, [[1, 3], [3, 1]]),
    "biases": (Cell("glm4_moe", "single", "full", variant="balanced"), 2, PP, [[1, 3], [3, 1]]),
}


def config(cell: Cell, **parallel: Any) -> RunConfig:
    cfg = run_config(cell, "adamw")
    optimizer = replace(cfg.optimizer, lr=0.01, eps=0.01)
    return replace(cfg, optimizer=optimizer, parallel=Parallel(**parallel))



@pytest.mark.parametrize("case", CASES)
def test_layers_move_and_nothing_else_changes(case):
    cell, num_ranks, parallel, splits = CASES[case]
    reference = replace(cell, variant=cell.variant + "-copy") if cell.variant == "nf4" else cell
    (single,) = run_ranks(1, trained, config(cell))
    still = run_ranks(num_ranks, trained, config(cell, **parallel), splits[:1])
    ranks = run_ranks(num_ranks, trained, config(cell, **parallel), splits)
    def off(a, b):
        worst = max(((a.tensors[k].double()-b.tensors[k].double()).abs().max().item(), k) for k in a.tensors)
        return [x-y for x, y in zip(a.losses, b.losses)], [x/y-1 for x, y in zip(a.norms, b.norms)], worst, a.tensors.keys()==b.tensors.keys()
    print(case, "single/still", off(single, still[0]))
    print(case, "still/moved", off(still[0], ranks[0]), off(ranks[0], ranks[1])[2])
