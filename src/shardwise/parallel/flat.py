"""Parameters that lie in fsdp1's flat ones: a rank's piece of each, and its portable form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.base.interfaces import Mesh, ParallelModel, ParameterFacts, Part
from shardwise.base.layouts import shard_dim
from shardwise.parallel.place import cut, full_tensor, placed
from shardwise.parallel.reduce import sum_over


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a parameter, laid flat, that this rank holds; maybe none."""

    shape: torch.Size
    """The shape of the complete parameter."""
    start: int
    stop: int


def portable(
    pm: ParallelModel, part: Part, flat: Sequence[Any], mesh: Mesh
) -> tuple[
    Callable[[str, torch.Tensor], torch.Tensor], Callable[[str, torch.Tensor, torch.Tensor], None]
]:
    """Return `to_portable` and `from_portable` of ParallelModel for parameters that lie in `flat`.

    The portable form is a DTensor along `mesh.shard_axis`, as under fsdp2.
    """
    pieces = _pieces(part, flat)
    for name, parameter in part.hf.named_parameters():
        if name in pieces:
            pm.parameter_facts[parameter] = ParameterFacts(sharded_axes=(mesh.shard_axis,))

    def to_portable(name: str, local: torch.Tensor) -> torch.Tensor:
        piece = pieces.get(name)
        if piece is None:
            return pm.to_portable(name, local)
        full = torch.zeros(piece.shape, dtype=local.dtype, device=local.device)
        full.view(-1)[piece.start : piece.stop].copy_(local.detach().view(-1))
        # All pieces go to all ranks, as a sum of tensors that are 0 outside the rank's piece:
        # 2 (n-1)/n of one parameter's bytes leave each rank.
        sum_over(full, mesh, (mesh.shard_axis,))
        return _shard(full, mesh.along(mesh.shard_axis))

    def from_portable(name: str, local: torch.Tensor, portable: torch.Tensor) -> None:
        piece = pieces.get(name)
        if piece is None:
            pm.from_portable(name, local, portable)
            return
        assert portable.shape == piece.shape, (portable.shape, piece.shape)
        with torch.no_grad():  # An all-gather of one parameter, unless every rank has it.
            local.view(-1).copy_(full_tensor(portable).reshape(-1)[piece.start : piece.stop])

    return to_portable, from_portable


def _pieces(part: Part, flat: Sequence[Any]) -> dict[str, Piece]:
    names = {parameter: name for name, parameter in part.hf.named_parameters()}
    pieces = {}
    for flat_parameter in flat:
        infos = flat_parameter._shard_param_infos
        for parameter, shape, info in zip(flat_parameter._params, flat_parameter._shapes, infos):
            start = info.intra_param_start_idx if info.in_shard else 0
            stop = info.intra_param_end_idx + 1 if info.in_shard else 0
            pieces[names[parameter]] = Piece(shape, start, stop)
    return pieces


def _shard(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    dim = shard_dim(full.shape, mesh.size())
    assert dim is not None, "no dim is taken"
    # A copy, so that the rest is freed.
    local = cut(full, dim, mesh.size())[mesh.get_local_rank()].clone()
    return placed(local, mesh, [Shard(dim)], full.shape)
