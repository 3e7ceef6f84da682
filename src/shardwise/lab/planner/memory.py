"""The bytes on a rank by part, and those of its weights, gradients and optimizer states.

Closed formulas count the states between the last backward of a step and the next step, under
every layout. Gradients take the dtype of their weight, or float32 under
`training.accumulation: float32`. Activations, gathered weights and buckets are in `peak.py`.
tests/parallel/test_state_bytes.py counts the tensors that real ranks hold.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.base.layouts import context_joins_of, num_strategy_ranks
from shardwise.config import RunConfig, require
from shardwise.lab.planner.messages import Share
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.strategies import strategy_of
from shardwise.parallel.strategy import Elements
from shardwise.parallel.weights import gradient_bytes

USABLE = 0.95
"""The share of a device's memory that a plan may use, and of a budget that a choice may; the rest
is for an allocator's fragments and the errors of formulas."""


class PeakBytes(NamedTuple):
    """The bytes that are alive on a rank at the peak of a step."""

    weights: int = 0
    """The weights that the rank keeps between steps."""
    gradients: int = 0
    """Gradients, or the shards of them."""
    optimizer: int = 0
    """The states of the optimizer."""
    activations: int = 0
    """Bytes that forwards have kept for backwards."""
    buffers: int = 0
    """Gathered weights, buckets, partial sums and messages: what is there to be communicated."""
    temporary: int = 0
    """Bytes that a unit or the optimizer needs while it runs, the rows of the step, and
    constants."""
    overhead: int = 0
    """Bytes that the device's runtime and libraries take; 0 on a CPU."""
    host: int = 0
    """Bytes offloaded to the memory of the host: no part of the total."""
    moment: str = ""
    """When the peak is, such as "backward of the head"."""

    @property
    def total(self) -> int:
        """All bytes."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.temporary + self.overhead

    def plus(self, **sizes: int) -> "PeakBytes":
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
    # Weights are sharded over data and context together (docs/decisions/050-context-cut.md).
    rank = coordinates[context_joins_of(cfg)] * sizes["cp"] + coordinates["cp"]
    total = Counter[str]({"weights": 0, "gradients": 0, "optimizer": 0})
    strategy, num_shards = strategy_of(cfg), num_strategy_ranks(cfg, sizes)
    for chunk in share.chunks:
        for times, elements in strategy.held(cfg, chunk, num_shards, rank):
            _add(total, cfg, times, elements)
    return dict(total)


def _add(total: Counter[str], cfg: RunConfig, times: int, held: Elements) -> None:
    """Add as many times what a rank holds of a weight; twice where a reference starts from it.

    With `offload: optimizer` the optimizer works on copies of what it updates. They count with its
    states, and their gradients have no padding.
    """
    is_twice = cfg.keeps_start and held.states is not None
    total["weights"] += times * (1 + is_twice) * held.weights * held.itemsize
    gradients = held.gradients
    if held.states is not None:
        states = update_rule_of(cfg).state_bytes(held.states, held.itemsize, held.is_selected)
        if cfg.parallel.offload == "optimizer":
            gradients = held.states
            states += held.states * held.itemsize
        total["optimizer"] += times * states
    total["gradients"] += times * gradient_bytes(cfg, gradients, held.itemsize)
