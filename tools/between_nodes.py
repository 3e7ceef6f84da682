"""The bytes that nodes send to one another in a training step, by the formulas of
`communication.py`.

Ranks lie on nodes in their order, as torchrun and srun place them: with 8 ranks on a node, 0 to 7
on the first. So an axis whose ranks are near one another, such as `tp`, sends nothing to other
nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from shardwise.assembly.describe import Description
from shardwise.base.layouts import AXES, EXPERT_AXES, context_joins_of
from shardwise.base.schedule.context import MessageKind
from shardwise.config import RunConfig
from shardwise.lab.planner.communication import each_message, ring_bytes
from shardwise.lab.planner.messages import sizes_of
from shardwise.lab.planner.share import share_of
from shardwise.parallel.sent import Messages, parts_of


def bytes_between_nodes(
    cfg: RunConfig, run: Description, num_per_node: int, boundaries: Sequence[int] | None = None
) -> dict[MessageKind, int] | None:
    """Return what all ranks together send to ranks of other nodes in a step, by kind of message.

    Every collective runs around a ring of its ranks in their order, so that each rank sends to the
    next one only; an all-to-all sends as much to each. Every token is a target, and routers give
    each rank as many. `boundaries`: see `share_of`. None where ranks of `cp` on several nodes send
    point to point, of which the formulas do not know the receivers.
    """
    grid = torch.arange(prod(run.sizes.values())).view(*run.sizes.values())
    parts: dict[object, Any] = {}
    groups = cache(lambda axis: _groups(cfg, run, grid, axis))
    total: Counter[MessageKind] = Counter()
    for rank in range(grid.numel()):
        places = dict(zip(AXES, (grid == rank).nonzero()[0].tolist(), strict=True))
        share = share_of(cfg, run, places, boundaries, parts)
        for message in each_message(cfg, run, share):
            ranks = next(ranks for ranks in groups(message.axis) if rank in ranks)
            nodes = [other // num_per_node for other in ranks]
            if len(set(nodes)) == 1:
                continue
            if message.kind == "send" and message.receiver is None:
                return None
            total[message.kind] += round(_leaving(message, nodes, ranks.index(rank)))
    return dict(total)


def _leaving(message: Messages, nodes: Sequence[int], place: int) -> float:
    """Return the bytes of messages that leave the node of the rank at a place in its group.

    `nodes`: those of all ranks of the group.
    """
    here = nodes[place]
    if message.kind == "all-to-all":
        return message.num_bytes * sum(node != here for node in nodes) / len(nodes)
    receiver = (place + 1) % len(nodes) if message.receiver is None else message.receiver
    leaves = nodes[receiver] != here
    return leaves * ring_bytes(message.kind, message.num_bytes, len(nodes))


def _groups(cfg: RunConfig, run: Description, grid: torch.Tensor, axis: str) -> list[list[int]]:
    """Return the ranks of each group along an axis, which may be joined or of experts."""
    parts = (context_joins_of(cfg), "cp") if axis in EXPERT_AXES else parts_of(axis)
    dims = [AXES.index(part) for part in parts]
    rows = grid.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
    if axis in EXPERT_AXES:
        sizes = sizes_of(cfg, run)
        rows = rows.unflatten(-1, [sizes[part] for part in EXPERT_AXES])
        rows = rows.movedim(EXPERT_AXES.index(axis) - 2, -1)
    return rows.flatten(end_dim=-2).tolist()
