"""Build the grid of ranks from a run file."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import Mesh


def build_mesh(cfg: RunConfig, device: torch.device) -> Mesh:
    """The mesh of this run; the process group must be up. Raises UserError where the sizes do not fit the world.

    Ranks are numbered with `tp` fastest and `pp` slowest, so that the axes that talk most lie within a node.
    """
    sizes = mesh_sizes(cfg, dist.get_world_size())
    return Mesh(init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), device)


def mesh_sizes(cfg: RunConfig, world_size: int) -> dict[str, int]:
    """Axis sizes for `world_size` ranks: what other axes leave goes to dp_shard (fsdp) or dp_replicate (ddp, zero)."""
    parallel, training = cfg.parallel, cfg.training
    sizes = dict.fromkeys(Mesh.AXES, 1)
    sizes["pp"], sizes["tp"] = parallel.pp, parallel.tp
    model = parallel.pp * parallel.tp  # processes that hold one copy of the model, unsharded
    if world_size % model:
        asked = " x ".join(f"parallel.{axis}" for axis in ("pp", "tp") if sizes[axis] > 1)
        raise UserError(
            f"{asked} is {model}, which does not divide the {world_size} processes; "
            f"use --nproc {model} or a multiple of it"
        )
    left = world_size // model
    if parallel.data == "single":
        if left != 1:
            raise UserError(
                f"parallel.data is single but there are {world_size} processes; "
                f"use --nproc {model}, or parallel.data ddp or fsdp2"
            )
    elif parallel.data in ("ddp", "zero1", "zero2"):
        sizes["dp_replicate"] = left
    else:
        if left % parallel.dp_replicate:
            raise UserError(
                f"parallel.dp_replicate is {parallel.dp_replicate}, which does not divide the {left} "
                f"processes{f' that hold each of the {model} parts of the model' * (model > 1)}; "
                f"use one of {_divisors(left)}"
            )
        sizes["dp_replicate"] = parallel.dp_replicate
        sizes["dp_shard"] = left // parallel.dp_replicate
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]
    unit = data_size * training.micro_batch_size
    if training.global_batch_size % unit:
        below = training.global_batch_size // unit * unit
        ways = " or ".join(str(size) for size in (below, below + unit) if size)
        raise UserError(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of {data_size} data-parallel "
            f"processes x micro_batch_size {training.micro_batch_size}; use {ways}"
        )
    return sizes


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
