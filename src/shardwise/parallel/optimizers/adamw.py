"""The description of AdamW; `parallel/by_element.py` does it."""

from collections.abc import Mapping
from math import prod

from shardwise.base.layouts import strategy_facts
from shardwise.config import RunConfig
from shardwise.parallel.update_rule import UpdateRule
from shardwise.parallel.weights import Weight


class AdamWUpdate(UpdateRule):
    """AdamW (arXiv 1711.05101)."""

    name = "adamw"

    def update_bytes(self, cfg: RunConfig, numels: Mapping[Weight, int], is_gloo: bool) -> int:
        """Return the bytes of copies of shards that are not contiguous: it needs nothing else."""
        return sum(n * w.itemsize for w, n in numels.items() if _is_strided(cfg, w))


def _is_strided(cfg: RunConfig, weight: Weight) -> bool:
    """Return whether zero's shard is a view along a later dim: see `by_element.AdamW`."""
    sharded = strategy_facts(cfg.parallel).sharded
    is_view = "optimizer" in sharded and "weights" not in sharded
    return is_view and weight.shard_dim is not None and prod(weight.shape[: weight.shard_dim]) > 1
