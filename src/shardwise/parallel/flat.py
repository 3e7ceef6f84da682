"""Parameters that lie in fsdp1's flat ones: what a rank holds of each, and back to tensors of their own shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.interfaces import Mesh, ParallelModel, ParameterFacts, Part
from shardwise.parallel.place import cut, full_tensor, shard_dim
from shardwise.parallel.reduce import sum_over


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a parameter: elements `start` to `stop` of it laid flat, none if they are equal."""

    shape: torch.Size  # of the whole
    start: int
    stop: int


def portable(
    pm: ParallelModel, part: Part, flat: Sequence[Any], mesh: Mesh
) -> tuple[
    Callable[[str, torch.Tensor], torch.Tensor], Callable[[str, torch.Tensor, torch.Tensor], None]
]:
    """`to_portable` and `from_portable` (see ParallelModel) of a model whose parameters lie in the parameters `flat`.

    Portable is a DTensor cut along `dp_shard`, as under fsdp2.
    """
    pieces = _pieces(pm, part, flat)

    def to_portable(name: str, held: torch.Tensor) -> torch.Tensor:
        piece = pieces.get(name)
        if piece is None:
            return pm.to_portable(name, held)
        whole = torch.zeros(piece.shape, dtype=held.dtype, device=held.device)
        whole.view(-1)[piece.start : piece.stop].copy_(held.detach().view(-1))
        # An all-reduce of what is 0 where a rank holds nothing: 2 (n-1)/n of one parameter's bytes leave each rank.
        sum_over(whole, mesh, ("dp_shard",))
        return _shard(whole, mesh.dense["dp_shard"])

    def from_portable(name: str, held: torch.Tensor, portable: torch.Tensor) -> None:
        piece = pieces.get(name)
        if piece is None:
            pm.from_portable(name, held, portable)
            return
        assert portable.shape == piece.shape, (portable.shape, piece.shape)
        with torch.no_grad():  # an all-gather of one parameter, unless it is whole
            held.view(-1).copy_(full_tensor(portable).reshape(-1)[piece.start : piece.stop])

    return to_portable, from_portable


def _pieces(pm: ParallelModel, part: Part, flat: Sequence[Any]) -> dict[str, Piece]:
    names = {parameter: name for name, parameter in part.hf.named_parameters()}
    pieces = {}
    for flat_parameter in flat:
        for parameter, shape, info in zip(
            flat_parameter._params, flat_parameter._shapes, flat_parameter._shard_param_infos
        ):
            start = info.intra_param_start_idx if info.in_shard else 0
            stop = info.intra_param_end_idx + 1 if info.in_shard else 0
            pieces[names[parameter]] = Piece(shape, start, stop)
            pm.parameter_facts[parameter] = ParameterFacts(sharded_axes=("dp_shard",))
    return pieces


def _shard(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    dim = shard_dim(whole.shape, mesh.size())
    local = cut(whole, dim, mesh.size())[mesh.get_local_rank()].clone()  # the rest is let go
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
