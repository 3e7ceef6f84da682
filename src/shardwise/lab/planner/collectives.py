"""Bytes that a rank sends in a step: counted collective by collective, and predicted.

Counted is what a call is given, not what a backend makes of it (gloo's reduce-scatter is an
all-reduce inside).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.assembly.build import Job
from shardwise.assembly.describe import describe
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import EXPERT_AXES
from shardwise.config import RunConfig
from shardwise.lab.planner.communication import bytes_leaving, messages_of_step, ring_bytes, unknown
from shardwise.lab.planner.messages import Total, add_up, sizes_of
from shardwise.lab.planner.share import share_of
from shardwise.models.adapters.peft_config import resumed
from shardwise.parallel.sent import Messages

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
        """Count along the axes of this mesh."""
        super().__init__()
        self.messages: list[Messages] = []
        self.uncounted: set[str] = set()
        """Collectives of a kind, or of a group of ranks, that this does not know."""
        self._mesh = mesh
        # Axes may have the same ranks: `ep` all of `cp`, for one. The last one here gives the name.
        axes = (*EXPERT_AXES, *mesh.gradient_axes, *mesh.AXES)
        used = [axis for axis in axes if mesh.size(axis) > 1]
        self._names = {_ranks(mesh.group(axis)): axis for axis in used}

    def by_name(self, total: Total) -> Total:
        """Return the same messages under the names of axes that this counts under."""
        return add_up(
            Messages(kind, self._names[_ranks(self._mesh.group(axis))], calls, num_bytes)  # ty: ignore[invalid-argument-type]
            for (kind, axis), (calls, num_bytes) in total.items()
        )

    @property
    def sent_bytes(self) -> int | None:
        """The bytes that left this rank, as `bytes_leaving` counts; None with `uncounted` ones."""
        if self.uncounted:
            return None
        sizes = {name: len(ranks) for ranks, name in self._names.items()}
        parts = [ring_bytes(m.kind, m.num_bytes, sizes[m.axis]) for m in self.messages]
        return round(sum(parts))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in _FREE:
            self._count(name, args)
        elif func.namespace == "_c10d_functional":
            self.uncounted.add(str(func))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        groups = [arg for arg in objects if "ProcessGroup" in str(arg._type())]
        ranks = _ranks(dist.ProcessGroup.unbox(groups[0])) if groups else ()
        if len(ranks) == 1:
            return
        if name not in _KINDS or ranks not in self._names:
            self.uncounted.add(f"{name} of ranks {ranks}")
            return
        kind, place = _KINDS[name]
        num_bytes = sum(tensor.nbytes for tensor in tree_leaves(args[place]))
        self.messages.append(Messages(kind, self._names[ranks], 1, num_bytes))


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group, which tell axes from one another."""
    return tuple(dist.get_process_group_ranks(group))


def targets_on_rank(job: Job, microbatches: Sequence[AnyBatch]) -> list[int]:
    """Return the targets among the tokens that this rank computes, of each micro-batch."""
    num_targets = []
    for batch in microbatches:
        for shard in job.pm.shard_batch:
            batch = shard(batch)
        num_targets.append(int(batch.num_target_tokens()))
    return num_targets


def predicted_bytes(
    cfg: RunConfig, job: Job, mesh: Mesh, num_targets: Sequence[int] | None = None
) -> int | None:
    """Return the bytes that leave this rank in a step, by formula.

    It is None for a model of a family that is not listed, and where something is `unknown`. Routers
    are taken to give each rank's experts equally many rows. `num_targets`: see `targets_on_rank`;
    by default all tokens are targets.
    """
    if not job.run.facts.is_listed or unknown(cfg) is not None:
        return None
    if job.chosen is not None:
        cfg = job.chosen.applied(cfg)
    run = describe(resumed(cfg, job.run.lora), mesh.dense.size())
    boundaries = None if job.cut is None else job.cut.split.boundaries
    coordinates = {axis: mesh.dense.get_local_rank(axis) for axis in mesh.AXES}
    share = share_of(cfg, run, coordinates, boundaries)
    return bytes_leaving(messages_of_step(cfg, run, share, num_targets), sizes_of(cfg, run))
