"""The bytes on a rank by part, and those of its weights, gradients and optimizer states.

Closed formulas count the states between the last backward of a step and the next step, under
every layout. Gradients take the dtype of their weight, or float32 under
`training.accumulation: float32`. Activations, gathered weights and buckets are in `peak.py`.
tests/parallel/test_state_bytes.py counts the tensors that real ranks hold.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.assembly.costs import gradient_bytes, optimizer_bytes
from shardwise.assembly.describe import describe
from shardwise.config import RunConfig, require
from shardwise.layouts import context_joins_of, num_strategy_ranks
from shardwise.planner.share import Chunk, Share, boundaries_of, share_of
from shardwise.planner.units import flat_parameters, flat_spans, left_whole, units_of
from shardwise.planner.weights import Weight

USABLE = 0.95
"""The share of a device's memory that a plan may use, and of a budget that a choice may; the rest
is for an allocator's fragments and the errors of formulas."""


class Memory(NamedTuple):
    """The bytes that are alive on a rank at the peak of a step."""

    weights: int = 0
    """The weights that the rank keeps between steps."""
    gradients: int = 0
    """Gradients, or the shards of them."""
    optimizer: int = 0
    """The states of the optimizer."""
    activations: int = 0
    """What forwards have kept for backwards."""
    buffers: int = 0
    """Gathered weights, buckets, partial sums and messages: what is there to be communicated."""
    temporary: int = 0
    """What a unit or the optimizer needs while it runs, the rows of the step, and constants."""
    overhead: int = 0
    """What the device's runtime and libraries take; 0 on a CPU."""
    host: int = 0
    """Bytes offloaded to the memory of the host: no part of the total."""
    moment: str = ""
    """When the peak is, such as "backward of the head"."""

    @property
    def total(self) -> int:
        """All bytes."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.temporary + self.overhead

    def plus(self, **sizes: int) -> Memory:
        """Return this memory with more bytes of some parts."""
        return self._replace(**{part: getattr(self, part) + size for part, size in sizes.items()})


def require_memory(cfg: RunConfig) -> None:
    """Raise UserError for a run whose states lie on disk: no formula here is about its window."""
    require(
        cfg.parallel.offload != "disk",
        "parallel.offload disk is not planned; leave it out of the plan, and see what it needs in "
        "docs/concepts/disk-offload.md",
    )


def state_bytes(
    cfg: RunConfig, share: Share, sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of `weights`, `gradients` and `optimizer` on one rank.

    `sizes`: ranks along each axis of the mesh; `coordinates`: of the rank along each of them.
    UserError with `offload: disk`.
    """
    require_memory(cfg)
    # Weights are sharded over data and context together (docs/decisions/040-mesh-by-role.md).
    rank = coordinates[context_joins_of(cfg)] * sizes["cp"] + coordinates["cp"]
    total = Counter[str]({"weights": 0, "gradients": 0, "optimizer": 0})
    for chunk in share.chunks:
        unsharded = left_whole(cfg, chunk)
        if cfg.parallel.data == "fsdp1":
            for weight in unsharded:
                _add(total, cfg, weight, weight.numel, weight.numel, weight.numel)
            _add_flat(total, cfg, chunk, num_strategy_ranks(cfg, sizes), rank)
            continue
        times = Counter(chunk.alike.values())
        for name, weights in chunk.of_layers.items():
            if chunk.alike.get(name, name) == name:
                of_layer = Counter[str]()
                for weight in weights:
                    if weight in unsharded:
                        _add(of_layer, cfg, weight, weight.numel, weight.numel, weight.numel)
                    else:
                        _add_sharded(of_layer, cfg, weight, rank)
                for part, num_bytes in of_layer.items():
                    total[part] += num_bytes * times.get(name, 1)
    return dict(total)


def most_state_bytes(cfg: RunConfig, num_ranks: int) -> int:
    """Return the bytes of weights, gradients and optimizer states on the rank with the most.

    UserError where the run may not begin.
    """
    run = describe(cfg, num_ranks)
    boundaries, most = boundaries_of(cfg, run), 0
    for place in itertools.product(*map(range, run.sizes.values())):
        coordinates = dict(zip(run.sizes, place, strict=True))
        share = share_of(cfg, run, coordinates, boundaries)
        most = max(most, sum(state_bytes(cfg, share, run.sizes, coordinates).values()))
    return most


def _add_sharded(total: Counter[str], cfg: RunConfig, weight: Weight, rank: int) -> None:
    """Add the bytes of a weight of which data ranks have shards.

    zero1 and zero2 keep all of the weight, and the gradient and states of a shard. fsdp2 keeps a
    shard of all three; weight and gradient have as many rows on each rank, the last ones padding.
    Neighbours along `ep` have other experts, so each of them has the same shard of its own.
    """
    shard = weight.shard_numel(rank if weight.ep_dim is None else rank // cfg.parallel.ep)
    if cfg.parallel.data == "fsdp2":
        padded = weight.padded_numel // weight.num_shards
        _add(total, cfg, weight, padded, padded, shard)
    else:
        _add(total, cfg, weight, weight.numel, shard, shard)


def _add_flat(
    total: Counter[str], cfg: RunConfig, chunk: Chunk, num_shards: int, rank: int
) -> None:
    """Add the bytes of fsdp1's flat parameters, of each of which a rank has an equal piece.

    The gradient of a flat parameter with something trained in it is as large as the piece. States
    are those of the trained elements that lie in the piece, and a counter for each weight, also
    where none of it does.
    """
    for unit in units_of(chunk, "fsdp1"):
        for weights in flat_parameters(unit, cfg.parallel.fsdp1_wrap):
            spans, itemsize = flat_spans(weights), weights[0].itemsize
            piece = -(-spans[-1][1] // num_shards)
            total["weights"] += piece * itemsize
            if any(weight.is_trained for weight in weights):
                total["gradients"] += gradient_bytes(cfg, piece, itemsize)
            for weight, (start, end) in zip(weights, spans, strict=True):
                overlap = min(end, (rank + 1) * piece) - max(start, rank * piece)
                if weight.is_trained:
                    total["optimizer"] += optimizer_bytes(cfg, max(0, overlap), itemsize)


def _add(
    total: Counter[str], cfg: RunConfig, weight: Weight, numel: int, gradient: int, state: int
) -> None:
    """Add a weight of which a rank has so many elements, of its gradient and of each state.

    With `offload: optimizer` the optimizer works on copies of what it updates. They count with its
    states, and their gradients have no padding.
    """
    total["weights"] += numel * weight.itemsize
    if not weight.is_trained:
        return
    if cfg.parallel.offload == "optimizer":
        gradient = state
        total["optimizer"] += state * weight.itemsize
    total["gradients"] += gradient_bytes(cfg, gradient, weight.itemsize)
    total["optimizer"] += optimizer_bytes(cfg, state, weight.itemsize, weight.is_selected)
