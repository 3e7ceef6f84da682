"""Sums over mesh axes: the one place where gradients, losses and counts are added up by our own collectives.

And what every rank has to say, where that is no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwise.interfaces import Mesh
from shardwise.parallel.place import local

# torch 2.13 renames them and warns at the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks along these hold different rows of a global batch."""
BUCKET_ELEMENTS = 2**22
"""As many gradients are added up together: enough that a message's latency does not matter."""


def sum_over(tensor: torch.Tensor, mesh: Mesh, axes: Iterable[str]) -> torch.Tensor:
    """Add `tensor` up over `axes`, in place: 2 (n-1)/n of its bytes leave each rank per axis of size n."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.dense.get_group(axis))
    return tensor


def sum_gradients(
    parameters: Iterable[torch.nn.Parameter], mesh: Mesh, axes: Iterable[str]
) -> None:
    """Add the gradients of replicated parameters up over `axes`, in float32, some of them in one flat tensor at a time.

    Memory: the largest gradient and BUCKET_ELEMENTS, 4 bytes each.
    """
    for bucket in _buckets(None if p.grad is None else local(p.grad) for p in parameters):
        flat = sum_over(torch.cat([gradient.flatten().float() for gradient in bucket]), mesh, axes)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Iterable[torch.Tensor | None]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        assert gradient is not None
        bucket.append(gradient)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def of_every_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank (of a group), in rank order: small plain data, pickled, from each rank to all."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
