"""Weights whose ranks hold rows that do not follow one another, in the order of their model."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwise.base.interfaces import ParallelModel
from shardwise.models.tensor_cuts import DimCut, Rows
from shardwise.parallel.place import axes_of


def in_order(pm: ParallelModel, reordered: Mapping[str, DimCut], axis: str) -> ParallelModel:
    """Let what is portable of a model have its rows in order.

    `reordered`: cuts of parameters, by name, along `axis` of the mesh. The ranks' shares, joined in
    rank order, are not the complete parameter.
    """

    def to_portable(name: str, local: torch.Tensor) -> torch.Tensor:
        portable = pm.to_portable(name, local)
        cut = reordered.get(name)
        if cut is None:
            return portable
        rows = _in_blocks(cut, portable, cut.rows.local_size * cut.rows.num_ranks)
        return _with_rows(portable, rows.restore(_joined(portable, axis), cut.dim), axis)

    def from_portable(name: str, local: torch.Tensor, portable: torch.Tensor) -> None:
        cut = reordered.get(name)
        if cut is not None:
            rows = _in_blocks(cut, portable, cut.rows.size)
            if isinstance(portable, DTensor):
                arranged = rows.arrange(_joined(portable, axis), cut.dim)
                portable = _with_rows(portable, arranged, axis)
            else:
                portable = rows.arrange(portable, cut.dim)
        pm.from_portable(name, local, portable)

    return replace(pm, to_portable=to_portable, from_portable=from_portable)


def _in_blocks(cut: DimCut, portable: torch.Tensor, size: int) -> Rows:
    """Return the rows of a cut, in blocks where a state has one number for several of `size`."""
    return cut.rows.in_blocks(size // portable.shape[cut.dim])


def _joined(portable: torch.Tensor, axis: str) -> torch.Tensor:
    """Return the shares of all ranks along `axis`, in rank order; along other axes this rank's."""
    joined = portable.detach()
    assert isinstance(joined, DTensor)
    return joined.redistribute(placements=_replicated_over(axis, joined)).to_local()


def _with_rows(like: torch.Tensor, joined: torch.Tensor, axis: str) -> DTensor:
    """Reverse `_joined`: place as `like` is, whose sharded dim may have another size."""
    assert isinstance(like, DTensor)
    replicated = _replicated_over(axis, like)
    full = DTensor.from_local(joined, like.device_mesh, replicated, run_check=False)
    return full.redistribute(placements=like.placements)


def _replicated_over(axis: str, like: DTensor) -> list[Placement]:
    by_axis = zip(axes_of(like), like.placements, strict=True)
    return [Replicate() if name == axis else placement for name, placement in by_axis]
