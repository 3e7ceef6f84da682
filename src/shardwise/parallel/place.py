"""Give parameters memory on this rank and fill them from full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def materialise(module: nn.Module, device: torch.device) -> None:
    """Replace parameters on `meta` by uninitialised memory on `device`: the local shard where they are sharded.

    Tied parameters stay one parameter (nn.Module.to_empty would part them). Buffers are real already: they only move.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                # fsdp2 picks the new parameters up at its first forward.
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            owner._parameters[name] = made[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


@torch.no_grad()
def fill(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy the share of this rank of `full` into `target`; every rank has `full`, so nothing is sent or allocated."""
    assert target.shape == full.shape, (target.shape, full.shape)
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            # As DTensor cuts: pieces of ceil(size / n), the last ones smaller or empty.
            pieces = full.chunk(target.device_mesh.size(axis), placement.dim)
            mine = target.device_mesh.get_local_rank(axis)
            full = pieces[mine] if mine < len(pieces) else full.narrow(placement.dim, 0, 0)
    target.to_local().copy_(full)


def fill_all(targets: Mapping[str, torch.Tensor], values: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Fill named targets from (name, full tensor) pairs, one at a time; return the names that were filled."""
    filled = set()
    for name, full in values:
        fill(targets[name], full)
        filled.add(name)
    return filled


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank of its mesh (an all-gather where it is sharded)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
