"""Build the grid of ranks from a run file."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import EXPERT_AXES, Facts, axis_sizes, context_joins_of
from shardwise.config import RunConfig, rules


def build_mesh(cfg: RunConfig, device: torch.device) -> Mesh:
    """Return the mesh of this run; the process group must be up.

    Ranks are numbered with `tp` fastest and `pp` slowest, so that the axes that communicate most
    lie within a node. Raises UserError where a rule refuses the sizes.
    """
    num_ranks = dist.get_world_size()
    rules.check(cfg, Facts(num_ranks))
    sizes = axis_sizes(cfg, num_ranks)
    dense = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh = Mesh(dense, device, context_joins_of(cfg), cfg.parallel.ep)
    for axis in (*mesh.gradient_axes, *(EXPERT_AXES if mesh.ep > 1 else ())):
        mesh.group(axis)  # All ranks make the group of a flattened axis here, in the same order.
    return mesh
