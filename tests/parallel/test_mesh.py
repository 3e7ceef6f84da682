"""Axis sizes, slots, and sizes that do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise import rules
from shardwise.config import Data, Model, Parallel, RunConfig, Training, UserError
from shardwise.layouts import Facts, axis_sizes
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks


def config(
    data: str = "single",
    dp_replicate: int = 1,
    global_batch: int = 8,
    micro_batch: int = 1,
    pp: int = 1,
    tp: int = 1,
) -> RunConfig:
    return RunConfig(
        Model("m"),
        Data("d"),
        Training("o", global_batch_size=global_batch, micro_batch_size=micro_batch, device="cpu"),
        parallel=Parallel(data, dp_replicate, pp=pp, tp=tp),
    )


@pytest.mark.parametrize(
    ("data", "dp_replicate", "world", "expected"),
    [
        ("single", 1, 1, (1, 1)),
        ("ddp", 1, 4, (4, 1)),
        ("zero1", 1, 4, (4, 1)),
        ("zero2", 1, 2, (2, 1)),
        ("fsdp1", 1, 4, (1, 4)),
        ("fsdp2", 1, 4, (1, 4)),
        ("fsdp2", 2, 4, (2, 2)),
    ],
)
def test_what_is_left_of_the_world(data, dp_replicate, world, expected):
    sizes = axis_sizes(config(data, dp_replicate), world)
    assert (sizes["dp_replicate"], sizes["dp_shard"]) == expected
    assert sizes["pp"] == sizes["cp"] == sizes["tp"] == 1


@pytest.mark.parametrize(
    ("cfg", "world", "message"),
    [
        (config("single"), 2, "parallel.data is single but there are 2 processes; use --nproc 1"),
        (
            config("fsdp2", 3),
            4,
            r"dp_replicate is 3, which does not divide the 4 .*; use 1, 2 or 4",
        ),
        (
            config("ddp", global_batch=6),
            4,
            "global_batch_size 6 is not a multiple of 4 .* use 4 or 8",
        ),
        (config("ddp", global_batch=2, micro_batch=2), 2, "global_batch_size 2 .* use 4"),
        (
            config(pp=3),
            4,
            "parallel.pp is 3, which does not divide the 4 processes; use --nproc 3 or a multiple of it",
        ),
        (config(pp=4), 2, "parallel.pp is 4, .* use --nproc 4 or a multiple"),
        (
            config(pp=2),
            4,
            "parallel.data is single but there are 4 processes; use --nproc 2, or parallel.data ddp or",
        ),
        (
            config("fsdp2", 3, pp=2),
            4,
            r"dp_replicate is 3, which does not divide the 2 .*; use 1 or 2",
        ),
        (
            config(tp=4),
            2,
            "parallel.tp is 4, which does not divide the 2 processes; use --nproc 4 or a multiple of it",
        ),
        (
            config(pp=2, tp=2),
            2,
            "parallel.pp x parallel.tp is 4, which does not divide the 2 processes; use --nproc 4",
        ),
        (
            config(tp=2),
            4,
            "parallel.data is single but there are 4 processes; use --nproc 2, or parallel.data ddp or",
        ),
        (
            config("ddp", global_batch=6, pp=2),
            8,
            "global_batch_size 6 is not a multiple of 4 .* use 4 or 8",
        ),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(cfg, world, message):
    with pytest.raises(UserError, match=message):
        rules.check(cfg, Facts(world))


@pytest.mark.parametrize(
    ("data", "dp_replicate", "expected"),
    [("ddp", 1, (4, 1)), ("fsdp2", 1, (1, 4)), ("fsdp2", 2, (2, 2))],
)
def test_a_pipeline_leaves_the_rest_of_the_world_to_data(data, dp_replicate, expected):
    sizes = axis_sizes(config(data, dp_replicate, pp=2), 8)
    assert (sizes["pp"], sizes["dp_replicate"], sizes["dp_shard"]) == (2, *expected)


def test_tensor_ranks_are_neighbours_and_read_the_same_rows():
    sizes = axis_sizes(config("fsdp2", 2, pp=2, tp=2), 16)
    assert list(sizes.items()) == [
        ("pp", 2),
        ("dp_replicate", 2),
        ("dp_shard", 2),
        ("cp", 1),
        ("tp", 2),
    ]
    results = run_ranks(4, _slots_with_tensor)
    assert results == [(range(4), 0), (range(4), 1), (range(4, 8), 0), (range(4, 8), 1)]


def _slots_with_tensor() -> tuple[range, int]:
    mesh = build_mesh(config("ddp", tp=2), torch.device("cpu"))
    return mesh.slots(8), mesh.dense.get_local_rank("tp")


def _slots() -> tuple[list[int], int, int]:
    mesh = build_mesh(config("fsdp2", dp_replicate=2), torch.device("cpu"))
    return list(mesh.slots(8)), mesh.data_rank, dist.get_rank()


def test_slots_are_shared_out_once():
    results = run_ranks(4, _slots)
    assert [slots for slots, _, _ in results] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(data_rank == rank for _, data_rank, rank in results)
