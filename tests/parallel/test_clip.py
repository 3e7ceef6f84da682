"""The global norm of gradients that are sharded, replicated, or neither."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.base.interfaces import Mesh
from shardwise.parallel.clip import clip_by_global_norm, global_norm
from tests.distributed import run_ranks


def _norms() -> tuple[float, float, float]:
    mesh = Mesh(
        init_device_mesh("cpu", (1, 2, 2, 1, 1), mesh_dim_names=Mesh.AXES), torch.device("cpu")
    )
    hsdp = mesh.dense["dp_replicate", "dp_shard"]
    # Sharded over two ranks, the same on both replicas: rows (3, 0) and (0, 4) have norm 5
    # together.
    rows = (
        torch.tensor([[3.0, 0.0]])
        if mesh.dense.get_local_rank("dp_shard") == 0
        else torch.tensor([[0.0, 4.0]])
    )
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(1, 2), hsdp, [Replicate(), Shard(0)]))
    sharded.grad = DTensor.from_local(rows, hsdp, [Replicate(), Shard(0)])
    plain = nn.Parameter(torch.zeros(2))  # whole on every rank: counts once
    plain.grad = torch.tensor([12.0, 0.0])
    unused = nn.Parameter(torch.zeros(2))
    before = global_norm([sharded, plain, unused], mesh, {}).item()
    returned = clip_by_global_norm([sharded, plain, unused], mesh, {}, max_norm=1.3).item()
    return before, returned, global_norm([sharded, plain], mesh, {}).item()


def test_norm_counts_a_shard_once_and_a_replica_once():
    for before, returned, after in run_ranks(4, _norms):
        assert before == returned == 13.0  # sqrt(3^2 + 4^2 + 12^2)
        assert abs(after - 1.3) < 1e-6


def _small() -> tuple[float, list[float]]:
    mesh = Mesh(init_device_mesh("cpu", (1,) * 5, mesh_dim_names=Mesh.AXES), torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    clip_by_global_norm([parameter], mesh, {}, max_norm=1.0)
    unclipped = parameter.grad.tolist()
    parameter.grad *= 100
    return clip_by_global_norm([parameter], mesh, {}, max_norm=None).item(), unclipped


def test_small_gradients_and_no_limit_are_left_alone():
    ((norm, unclipped),) = run_ranks(1, _small)
    assert unclipped == torch.tensor([0.3, 0.4]).tolist()
    assert abs(norm - 50.0) < 1e-4


def _long() -> float:
    mesh = Mesh(init_device_mesh("cpu", (1,) * 5, mesh_dim_names=Mesh.AXES), torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(1024, 4097))
    parameter.grad = torch.full_like(parameter, 0.1)
    return global_norm([parameter], mesh, {}).item()


def test_the_norm_of_a_long_gradient_is_not_lost_in_rounding():
    (found,) = run_ranks(1, _long)
    expected = 0.1 * (1024 * 4097) ** 0.5
    assert abs(found / expected - 1) < 1e-6
    at_once = (
        torch.full((1024 * 4097,), 0.1).norm().item()
    )  # once torch adds up with more care, take it as it is
    assert abs(at_once / expected - 1) > 1e-4
