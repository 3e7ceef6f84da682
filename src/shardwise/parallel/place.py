"""Give parameters memory on this rank and fill them from full tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.base.interfaces import ParameterFacts
from shardwise.base.layouts import shard_dim
from shardwise.parallel.weights import are_few

if TYPE_CHECKING:
    from shardwise.models.spec import ModelSpec


def materialise(
    module: nn.Module,
    device: torch.device,
    only: type[torch.Tensor] = torch.Tensor,
    memory: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Replace parameters on `meta` (of type `only`) by uninitialised memory on `device`.

    Or by what `memory` returns for them. Of a sharded parameter it is this rank's shard. Tied
    parameters stay one parameter, which nn.Module.to_empty would separate. Buffers have values
    already: they only move.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta or not isinstance(parameter, only):
                continue
            if parameter not in made:
                # fsdp2 looks the new parameters up at its first forward.
                values = (
                    torch.empty_like(parameter, device=device)
                    if memory is None
                    else memory(parameter)
                )
                made[parameter] = nn.Parameter(values, parameter.requires_grad)
            owner._parameters[name] = made[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def odd_dtype(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters of another dtype than most elements have, such as float32 `A_log`.

    A list: sets iterate in another order on every rank, and collectives must not.
    """
    num_elements = Counter[torch.dtype]()
    for parameter in parameters:
        num_elements[parameter.dtype] += parameter.numel()
    return [p for p in parameters if p.dtype != num_elements.most_common(1)[0][0]]


def free_dim(parameter: torch.Tensor, num_shards: int) -> int | None:
    """Return the dim to shard where another may be sharded; None if no other divides evenly."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    taken = {placement.dim for placement in placements if isinstance(placement, Shard)}
    return shard_dim(parameter.shape, num_shards, taken)


def are_gradients_few(model: nn.Module, spec: ModelSpec) -> bool:
    """Return whether a rank that gathers layers keeps whole gradients: see `weights.are_few`."""
    trained = {p: local(p).numel() for p in model.parameters() if p.requires_grad}
    layers = (model.get_submodule(layer.name).parameters() for layer in spec.layers)
    return are_few(4 * sum(trained.values()), (sum(local(p).nbytes for p in ps) for ps in layers))


def cut(full: torch.Tensor, dim: int, num_shards: int) -> list[torch.Tensor]:
    """Return views of `full`, one per rank, as DTensor shards it.

    They are ceil(size / n) long, the last ones shorter or empty.
    """
    pieces = list(full.chunk(num_shards, dim))
    return pieces + [full.narrow(dim, 0, 0)] * (num_shards - len(pieces))


@torch.no_grad()
def fill(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy into `target` this rank's share of `full`, which every rank has: nothing is sent.

    A DTensor that is placed as the target is copied as it is.
    """
    assert target.shape == full.shape, (target.shape, full.shape)
    if isinstance(target, DTensor):
        if isinstance(full, DTensor):
            assert (full.device_mesh, full.placements) == (target.device_mesh, target.placements)
            full = full.to_local()
        else:
            for axis, placement in enumerate(target.placements):
                if isinstance(placement, Shard):
                    pieces = cut(full, placement.dim, target.device_mesh.size(axis))
                    full = pieces[target.device_mesh.get_local_rank(axis)]
        target = target.to_local()
    target.copy_(full)


def placed(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return a DTensor of this complete shape from this rank's part, without communication."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def placed_like(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, on any device, as a DTensor that is sharded as `like` is, if it is.

    `DTensor.from_local` would move it to the mesh's device. Autograd follows that call, so it takes
    110 us, not 10; ZeRO makes one for each trained parameter in a step. torch's FSDP2 calls the
    constructor, too.
    """
    if not isinstance(like, DTensor):
        return local
    spec = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def axes_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the mesh axes along which a DTensor is placed; none for a plain tensor."""
    return (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()


def sharded_axes(parameter: torch.Tensor, facts: ParameterFacts) -> tuple[str, ...]:
    """Return the mesh axes that a parameter is sharded over; along the others it is replicated."""
    if not isinstance(parameter, DTensor):
        return facts.sharded_axes
    by_axis = zip(axes_of(parameter), parameter.placements, strict=True)
    return tuple(name for name, placement in by_axis if isinstance(placement, Shard))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete tensor, on every rank of its mesh: an all-gather where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
