"""What a forked rank inherits from the process of the tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import run_ranks


def _columns() -> DTensor:
    """Every rank's shard is its rank within its group along `tp`; here two operators change
    nothing."""
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    shard = torch.full((2, 3), float(tp.get_local_rank()))
    placed = DTensor.from_local(shard, tp, [Shard(0)], run_check=False)
    return placed + torch.zeros_like(placed)


def _gathered() -> list[float]:
    return _columns().full_tensor()[:, 0].tolist()


def test_ranks_use_their_own_groups_after_a_fake_group_of_the_parent():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        _columns()
    finally:
        dist.destroy_process_group()
    assert run_ranks(4, _gathered) == [[0.0, 0.0, 1.0, 1.0]] * 4
