"""Count what one training step sends, beside what the library's formulas say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch

from shardwise.assembly.build import build
from shardwise.assembly.describe import Description, describe
from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.lab.planner.collectives import Collectives, targets_on_rank
from shardwise.lab.planner.communication import messages_of_step
from shardwise.lab.planner.messages import Total, add_up
from shardwise.lab.planner.share import share_of
from shardwise.models.causal_lm import CausalLM
from shardwise.models.routed_experts import Compute
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.step import training_step
from tests.parity.harness import Cell, microbatches, numerics_of, run_config


@dataclass(frozen=True)
class Counted:
    """What one rank sent in a step, and what the library's formulas say."""

    sent: Total
    predicted: Total


Dtype = Literal["float32", "bfloat16"]


Accumulation = Literal["model", "float32"]


def config(cell: Cell, dtype: Dtype, accumulation: Accumulation) -> RunConfig:
    cfg = run_config(cell)
    training = replace(cfg.training, accumulation=accumulation)
    return replace(cfg, model=replace(cfg.model, dtype=dtype), training=training)


@cache
def described(
    cell: Cell, dtype: Dtype = "float32", accumulation: Accumulation = "model"
) -> Description:
    """Return the whole run; ranks that are forked after the first call need not build it again."""
    with numerics_of(cell):
        return describe(config(cell, dtype, accumulation), cell.nproc)


def count(cell: Cell, dtype: Dtype = "float32", accumulation: Accumulation = "model") -> Counted:
    """Count a step of this rank with weights of `dtype`; the process group must be up."""
    with numerics_of(cell):
        return _count(cell, dtype, accumulation)


def _count(cell: Cell, dtype: Dtype, accumulation: Accumulation) -> Counted:
    cfg = config(cell, dtype, accumulation)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    # In the first step pipelines make their stages ready; ddp agrees upon its buckets in two.
    axes = cell.layout.split("-")
    for step in (1, 2) if "ddp" in axes else (1,) if "pp" in axes else ():
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
    batches = microbatches(cfg, mesh, 3)
    routed = count_routed(job.pm)
    with Collectives(mesh) as collectives:
        training_step(job, batches, mesh, 1.0)
    run = described(cell, dtype, accumulation)
    boundaries = None if job.cut is None else job.cut.split.boundaries
    share = share_of(cfg, run, coordinates(mesh), boundaries)
    num_targets = targets_on_rank(job, batches)
    received = {path: rows_received(counts, len(batches), mesh) for path, counts in routed.items()}
    assert not collectives.uncounted
    predicted = messages_of_step(cfg, run, share, num_targets, received)
    return Counted(add_up(collectives.messages), collectives.by_name(predicted))


def count_routed(pm: ParallelModel) -> dict[str, list[torch.Tensor]]:
    """Return lists to which each forward of a layer adds the rows that it has for each expert."""
    routed: dict[str, list[torch.Tensor]] = {}
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        for path, experts in part.experts.items():
            experts.compute = partial(_noting, experts.compute, routed.setdefault(path, []))
    return routed


def _noting(
    compute: Compute, counts: list[torch.Tensor], x: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    counts.append(ends.diff(prepend=ends.new_zeros(1)))
    return compute(x, ends)


def rows_received(counts: list[torch.Tensor], num_microbatches: int, mesh: Mesh) -> int:
    """Return the rows that this rank's experts got in a step from all ranks of `ep`.

    A forward that a backward runs again has counted them twice.
    """
    if mesh.ep == 1:
        return 0
    routed = torch.stack(counts).sum(0) * num_microbatches // len(counts)  # [E]
    from_each = torch.stack(from_every_rank(routed, mesh.group("ep")))
    return int(from_each.sum(0).view(mesh.ep, -1)[mesh.rank("ep")].sum())


def coordinates(mesh: Mesh) -> dict[str, int]:
    """Return where this rank stands along each axis."""
    return {axis: mesh.dense.get_local_rank(axis) for axis in mesh.AXES}
