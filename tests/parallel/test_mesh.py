"""Axis sizes, slots, sizes that do not fit, and which ranks are in which group."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import parallel
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import Facts, axis_sizes
from shardwise.base.words import groups_of_ranks
from shardwise.config import Data, Model, Parallel, RunConfig, Training, UserError, rules
from shardwise.lab.planner.divisions import rank_groups
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
        (config("ddp", global_batch=2, micro_batch=2), 2, r"use .*micro_batch_size 1, or .* 4"),
        (
            config(pp=3),
            4,
            "parallel.pp is 3, which does not divide the 4 .* use --nproc 3 or a multiple",
        ),
        (config(pp=4), 2, "parallel.pp is 4, .* use --nproc 4 or a multiple"),
        (
            config(pp=2),
            4,
            "parallel.data is single but there are 4 .* use --nproc 2, or parallel.data ddp",
        ),
        (
            config("fsdp2", 3, pp=2),
            4,
            r"dp_replicate is 3, which does not divide the 2 .*; use 1 or 2",
        ),
        (
            config(tp=4),
            2,
            "parallel.tp is 4, which does not divide the 2 .* use --nproc 4 or a multiple",
        ),
        (
            config(pp=2, tp=2),
            2,
            "parallel.pp x parallel.tp is 4, which does not divide the 2 processes; use --nproc 4",
        ),
        (
            config(tp=2),
            4,
            "parallel.data is single but there are 4 .* use --nproc 2, or parallel.data ddp",
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


def _grid(sizes: tuple[int, ...], context_joins: str, ep: int) -> Mesh:
    dense = init_device_mesh("cpu", sizes, mesh_dim_names=Mesh.AXES)
    return Mesh(dense, torch.device("cpu"), context_joins, ep)


def _groups(sizes: tuple[int, ...], context_joins: str, ep: int) -> dict[str, list[int]]:
    """The ranks of every group of this rank, by the name of its axis."""
    mesh = _grid(sizes, context_joins, ep)
    groups = {axis: mesh.group(axis) for axis in (*mesh.gradient_axes, "cp", "tp")}
    groups |= {axis: mesh.experts.get_group(axis) for axis in ("dp_expert", "ep")}
    for axis in mesh.gradient_axes:
        assert (mesh.rank(axis), mesh.size(axis)) == (groups[axis].rank(), groups[axis].size())
    assert mesh.experts is mesh.experts
    assert mesh.experts.get_group("tp") is mesh.group("tp")
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}


def test_groups_of_8_ranks_are_those_of_the_picture():
    """Where ranks shard: dp_shard 2, cp 2, tp 2; see the docstring of Mesh."""
    ranks = run_ranks(8, _groups, (1, 1, 2, 2, 2), "dp_shard", 2)
    assert list(ranks[0]) == ["dp_replicate", "dp_shard_cp", "cp", "tp", "dp_expert", "ep"]
    assert [rank["dp_replicate"] for rank in ranks] == [[n] for n in range(8)]
    assert [rank["dp_shard_cp"] for rank in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert [rank["cp"] for rank in ranks[::2]] == [[0, 2], [0, 2], [4, 6], [4, 6]]
    assert [rank["ep"] for rank in ranks[1::2]] == [[1, 3], [1, 3], [5, 7], [5, 7]]
    assert [rank["dp_expert"] for rank in ranks] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2


def test_context_joins_the_replicas_where_ranks_hold_copies():
    """A pipeline of 2 over dp_replicate 2, cp 2; all four ranks of a stage have other experts."""
    ranks = run_ranks(8, _groups, (2, 2, 1, 2, 1), "dp_replicate", 4)
    stages = [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [rank["dp_replicate_cp"] for rank in ranks] == stages
    assert [rank["ep"] for rank in ranks] == stages
    assert [rank["dp_expert"] for rank in ranks] == [[n] for n in range(8)]
    assert [rank["dp_shard"] for rank in ranks] == [[n] for n in range(8)]


def _without_context() -> tuple[set[str], int]:
    """The axes that gradients are added up over, and the groups made beyond those of `dense`."""
    mesh = build_mesh(config("fsdp2", dp_replicate=2), torch.device("cpu"))
    num_groups = len(dist.distributed_c10d._world.pg_map)
    for axis in mesh.gradient_axes:
        assert mesh.along(axis) == mesh.dense[axis]
        assert mesh.group(axis) is mesh.dense.get_group(axis)
    assert mesh.along(*mesh.gradient_axes) == mesh.dense["dp_replicate", "dp_shard"]
    return set(mesh.gradient_axes), len(dist.distributed_c10d._world.pg_map) - num_groups


def test_without_context_parallelism_axes_and_groups_are_those_of_the_grid():
    assert run_ranks(4, _without_context) == [({"dp_replicate", "dp_shard"}, 0)] * 4


def _ep_that_does_not_divide() -> None:
    _ = _grid((1, 1, 2, 1, 1), "dp_shard", 3).experts


def test_ep_divides_data_and_context():
    with pytest.raises(RuntimeError, match="ep 3 does not divide the 2 ranks of dp_shard"):
        run_ranks(2, _ep_that_does_not_divide)


def test_no_strategy_names_the_axes_of_data_and_context():
    """Except context parallelism itself, scales that are of the tokens of all its ranks, and what
    formulas have in place of a mesh."""
    named = ("mesh.py", "context_parallel.py", "context_attention.py", "float8_scales.py")
    named += ("sent.py",)
    files = [path for path in Path(parallel.__path__[0]).glob("*.py") if path.name not in named]
    assert len(files) > 10
    for path in files:
        assert not re.search(r"dp_replicate|dp_shard|\bcp\b", path.read_text()), path.name


def _groups_of_the_mesh(parallel: Parallel) -> dict[str, list[int]]:
    cfg = replace(config(), parallel=parallel)
    mesh = build_mesh(cfg, torch.device("cpu"))
    names = rank_groups(cfg, dist.get_world_size())
    return {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in names}


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel("ddp", tp=2),
        Parallel("fsdp2", dp_replicate=2, cp=2, tp=2),
        Parallel("fsdp2", cp=2, ep=2, tp=2),
        Parallel("ddp", pp=2, cp=2, ep=2),
    ],
)
def test_groups_that_a_plan_prints_are_those_that_torch_makes(parallel):
    cfg = replace(config(), parallel=parallel)
    groups, ranks = rank_groups(cfg, 8), run_ranks(8, _groups_of_the_mesh, parallel)
    assert {"tp", "cp", "ep", "pp"} & groups.keys() == {
        axis for axis in ("tp", "cp", "ep", "pp") if getattr(parallel, axis) > 1
    }
    for axis, found in groups.items():
        assert sorted(rank for group in found for rank in group) == [*range(8)]
        for rank, made in enumerate(ranks):
            assert next(group for group in found if rank in group) == made[axis], axis


def test_groups_of_ranks_in_words():
    cfg = config("ddp", tp=2)
    words = {axis: groups_of_ranks(found) for axis, found in rank_groups(cfg, 4).items()}
    assert words == {"tp": "[0,1] [2,3]", "dp_replicate": "[0,2] [1,3]"}
    cfg = config("fsdp2", dp_replicate=4, tp=8)
    words = {axis: groups_of_ranks(found) for axis, found in rank_groups(cfg, 512).items()}
    assert words["tp"] == "[0-7] [8-15] ... [504-511] (64 groups)"
    assert words["dp_shard"].startswith("[0,8,16,...,120] [1,9,17,...,121] ... [391,")
    assert words["dp_replicate"].endswith("... [127,255,383,511] (128 groups)")
    assert rank_groups(config(), 1) == {}
