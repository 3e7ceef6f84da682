"""Build the grid of ranks from a run file."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import rules
from shardwise.config import RunConfig
from shardwise.interfaces import Mesh
from shardwise.layouts import Facts, axis_sizes


def build_mesh(cfg: RunConfig, device: torch.device) -> Mesh:
    """Return the mesh of this run; the process group must be up. Raises UserError where a rule refuses its sizes.

    Ranks are numbered with `tp` fastest and `pp` slowest, so that the axes that communicate most lie within a node.
    """
    num_ranks = dist.get_world_size()
    rules.check(cfg, Facts(num_ranks))
    sizes = axis_sizes(cfg, num_ranks)
    forget_meshes()
    return Mesh(
        init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), device
    )


def forget_meshes() -> None:
    """Clear what DTensor has cached of operators on meshes of an earlier process group of this process.

    A mesh equals another of the same ranks and names, so that a cached result may hold the earlier one, whose groups
    are gone ("Could not resolve the process group").
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):
        clear()
