"""Memory for parameters, and their values, on whatever a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.base.layouts import shard_dim
from shardwise.parallel.place import fill, full_tensor, materialise, placed_like
from tests.distributed import run_ranks


def _fill_sharded(rows: int) -> bool:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp_replicate", "dp_shard"))
    full = torch.arange(rows * 6, dtype=torch.float32).view(rows, 6)
    right = True
    for dim in (0, 1):
        target = distribute_tensor(torch.zeros(rows, 6), mesh, [Replicate(), Shard(dim)])
        fill(target, full)
        right &= bool((full_tensor(target) == full).all())
    return right


@pytest.mark.parametrize("rows", [7, 2])  # uneven, fewer rows than ranks
def test_each_rank_takes_its_own_share(rows):
    assert all(run_ranks(6, _fill_sharded, rows))


def _placed_like(dtype: torch.dtype) -> bool:
    """It is what torch's public call returns, also in what is computed from it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    like = nn.Parameter(distribute_tensor(torch.arange(15.0).view(3, 5), mesh, [Shard(0)]))
    part = torch.full_like(like.to_local(), 2.0, dtype=dtype)
    got = placed_like(like, part)
    shape, stride = like.shape, like.stride()
    expected = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    assert got._spec == expected._spec
    assert got.dtype == dtype
    assert not got.requires_grad
    assert got.to_local().data_ptr() == part.data_ptr()
    sums = got + like.detach(), expected + like.detach()
    return bool((full_tensor(sums[0]) == full_tensor(sums[1])).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_placed_like_another_tensor(dtype):
    assert all(run_ranks(2, _placed_like, dtype))


def test_materialise_keeps_ties_flags_and_buffers():
    with torch.device("meta"):
        module = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})
    module["b"].weight = module["a"].weight
    module["a"].weight.requires_grad_(False)
    module["a"].register_buffer("scale", torch.tensor([2.0]))
    materialise(module, torch.device("cpu"))
    assert module["a"].weight is module["b"].weight
    assert module["a"].weight.device.type == "cpu"
    assert not module["a"].weight.requires_grad
    assert module["a"].scale.item() == 2.0


def test_fill_refuses_another_shape():
    with pytest.raises(AssertionError):
        fill(torch.zeros(2), torch.ones(1))


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((8, 3), 4, 0),
        ((4, 64), 8, 1),
        ((6, 5, 8), 4, 2),
        ((3, 5), 2, 0),
        ((7,), 4, 0),
        ((2, 3), 1, 0),
    ],
)
def test_the_first_dim_that_divides_evenly_is_cut(shape, num_shards, dim):
    assert shard_dim(shape, num_shards) == dim
