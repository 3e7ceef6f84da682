"""Count what one training step sends: every collective that is called, with its group and bytes.

Counted is what a call is given, not what a backend makes of it (gloo's reduce-scatter is an
all-reduce inside).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.batches import AnyBatch
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.layouts import EXPERT_AXES
from shardwise.models.causal_lm import CausalLM
from shardwise.models.patches.experts import Compute
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.reduce import of_every_rank
from shardwise.planner.communication import messages_of_step
from shardwise.planner.messages import Messages, Total, add_up
from shardwise.planner.share import share_of
from shardwise.training.step import training_step
from tests.parity.harness import Cell, microbatches, numerics_of, run_config

# Operator: (what it does, which argument is the whole that is reduced, gathered or sent).
_KINDS: dict[str, tuple[Any, int]] = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 0),
}
_FREE = {"recv_", "barrier", "monitored_barrier_"}  # a send's other end, and what carries nothing


class Collectives(TorchDispatchMode):
    """Counts the collectives of a `with` block on this rank.

    (torch's CommDebugMode puts hooks on modules, with which pipelines' halved backwards do not
    run.)
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.messages: list[Messages] = []
        self.mesh = mesh
        # Axes may have the same ranks: `ep` all of `cp`, for one. The last one here gives the name.
        axes = (*EXPERT_AXES, *mesh.gradient_axes, *mesh.AXES)
        used = [axis for axis in axes if mesh.size(axis) > 1]
        self.names = {self.ranks(mesh.group(axis)): axis for axis in used}

    @staticmethod
    def ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
        """Return the ranks of a group, by which axes are told apart."""
        return tuple(dist.get_process_group_ranks(group))

    def by_name(self, total: Total) -> Total:
        """Return the same messages under the names of axes that this counts under."""
        return add_up(
            Messages(kind, self.names[self.ranks(self.mesh.group(axis))], calls, num_bytes)  # ty: ignore[invalid-argument-type]
            for (kind, axis), (calls, num_bytes) in total.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in _FREE:
            kind, place = _KINDS[name]
            objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            group = next(arg for arg in objects if "ProcessGroup" in str(arg._type()))
            ranks = self.ranks(dist.ProcessGroup.unbox(group))
            num_bytes = sum(tensor.nbytes for tensor in tree_leaves(args[place]))
            if len(ranks) > 1:
                self.messages.append(Messages(kind, self.names[ranks], 1, num_bytes))
        assert func.namespace != "_c10d_functional", f"{func} is not counted"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """What one rank sent in a step, and what the library's formulas say."""

    sent: Total
    predicted: Total


def count(cell: Cell, dtype: Literal["float32", "bfloat16"] = "float32") -> Counted:
    """Count a step of this rank with weights of `dtype`; the process group must be up."""
    with numerics_of(cell):
        return _count(cell, dtype)


def _count(cell: Cell, dtype: Literal["float32", "bfloat16"]) -> Counted:
    cfg = run_config(cell)
    cfg = replace(cfg, model=replace(cfg.model, dtype=dtype))
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
    run = describe(cfg, mesh.dense.size())
    boundaries = None if job.cut is None else job.cut.split.boundaries
    share = share_of(cfg, run, coordinates(mesh), boundaries)
    num_targets = [num_targets_on_rank(job.pm, batch) for batch in batches]
    received = {path: rows_received(counts, len(batches), mesh) for path, counts in routed.items()}
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
    from_each = torch.stack(of_every_rank(routed, mesh.group("ep")))
    return int(from_each.sum(0).view(mesh.ep, -1)[mesh.rank("ep")].sum())


def num_targets_on_rank(pm: ParallelModel, batch: AnyBatch) -> int:
    """Return the targets among the tokens that this rank computes."""
    for shard in pm.shard_batch:
        batch = shard(batch)
    return int(batch.num_target_tokens())


def coordinates(mesh: Mesh) -> dict[str, int]:
    """Return where this rank stands along each axis."""
    return {axis: mesh.dense.get_local_rank(axis) for axis in mesh.AXES}
