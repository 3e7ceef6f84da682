"""Distributed data parallel: every rank holds all weights and a share of the rows.

Memory per rank: all weights, gradients and optimizer states. Communication per step: one all-reduce
of the trained gradients, 2 (n-1)/n of their bytes leave each rank, in buckets that overlap with the
backward. DDP forms buckets again after the first step of a start. A sum over three or more ranks
depends on them, so a run that resumes repeats one that was not interrupted to rounding.
Source: Li et al., "PyTorch Distributed", arXiv 2006.15704.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations as objects.
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, ParallelModel, Part
from shardwise.config import RunConfig
from shardwise.models.spec import ModelSpec
from shardwise.parallel.reduce import sum_over_copies

# torch 2.13 renames it and warns at the old name.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_FORWARD_SYNC = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Wrap the loaded model so that its backward adds gradients up over all replicas.

    Where nothing can be wrapped (`is_wrapped`), gradients are reduced after the last
    backward, one bucket after the other.
    """
    if not is_wrapped(cfg, (parameter.itemsize for parameter in pm.trained().values())):

        def reduce() -> None:
            sum_over_copies(pm.trained().values(), mesh)

        return replace(pm, reduce_grads=(*pm.reduce_grads, reduce))
    (part,) = pm.parts
    # Buffers are functions of the config and equal on every rank, so none is sent.
    no_buffers: dict[str, Any] = {_FORWARD_SYNC: False}
    wrapped = DistributedDataParallel(
        part,
        process_group=mesh.group(mesh.replica_axis),
        **no_buffers,
        # Gradients share the buckets' memory; those of earlier micro-batches lie beside it.
        gradient_as_bucket_view=True,
        init_sync=False,  # Each rank has read or drawn the same weights.
    )
    wrapped.register_comm_hook(wrapped.process_group, sum_hook)

    def set_sync(sync: bool) -> None:
        wrapped.require_backward_grad_sync = sync

    def run(
        pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        # The wrapper is the part for the run only: all others see the bare model and its names.
        return inner_run(replace(pm, parts=(cast(Part, wrapped),)), microbatches, loss_scale, train)

    inner_run = pm.run
    return replace(pm, run=run, set_sync=set_sync)


def is_wrapped(cfg: RunConfig, itemsizes: Iterable[int]) -> bool:
    """Return whether torch's wrapper adds up gradients, while the last backward runs.

    Elsewhere they are added up after it. Where torch's schedules halve a backward, the wrapper's
    hooks never run. It takes no DTensors, which tp and ep make of weights. And its buckets have the
    dtype of the weights, so it makes no float32 sums of weights in 16 bits. `itemsizes`: bytes of
    an element of each trained weight.
    """
    parallel = cfg.parallel
    sums_wider = cfg.training.accumulation == "float32" and any(size < 4 for size in itemsizes)
    return parallel.pp * parallel.tp * parallel.ep == 1 and not sums_wider


def sum_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce one bucket as a sum, in float32. DDP's own hook would make a mean of it."""
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer.float(), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))
