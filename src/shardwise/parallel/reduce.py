"""Sums of gradients, losses and counts over mesh axes, and values gathered from every rank."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.interfaces import Mesh
from shardwise.parallel.place import axes_of, local

# torch 2.13 renames these two and warns of the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

BUCKET_ELEMENTS = 2**22
"""Elements of gradients that are added up together: so many that latency does not matter."""


def sum_over(tensor: torch.Tensor, mesh: Mesh, axes: Iterable[str]) -> torch.Tensor:
    """Add `tensor` up over `axes`, in place, and return it.

    2 (n-1)/n of its bytes leave each rank for each axis of size n.
    """
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.group(axis))
    return tensor


def sum_gradients(
    parameters: Iterable[torch.nn.Parameter], mesh: Mesh, axes: Iterable[str]
) -> None:
    """Add the gradients of replicated parameters up over `axes`, in float32.

    Gradients are joined into flat buckets. Memory: the largest gradient and BUCKET_ELEMENTS, at 4
    bytes an element; none where each axis has one rank.
    """
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not axes:
        return
    for bucket in _buckets(parameters):
        flat = torch.cat([gradient.flatten().float() for gradient in bucket])
        # Gradients that are kept on the CPU are summed where the group can be reached.
        flat = sum_over(flat.to(mesh.device), mesh, axes)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(summed.view_as(gradient))


def sum_over_copies(parameters: Iterable[torch.nn.Parameter], mesh: Mesh) -> None:
    """Add the gradients of parameters up over all ranks that hold the same part of them."""
    by_axes: dict[tuple[str, ...], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_axes.setdefault(mesh.copy_axes(axes_of(parameter)), []).append(parameter)
    for axes in sorted(by_axes):
        sum_gradients(by_axes[axes], mesh, axes)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        bucket.append(local(parameter.grad))
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def from_every_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of every rank (of a group), in rank order: small plain data, pickled."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
