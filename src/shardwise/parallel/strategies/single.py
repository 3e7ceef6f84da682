"""No data parallelism: the ranks that compute a row are all that there are."""

from collections.abc import Iterable

from shardwise.config import RunConfig
from shardwise.parallel.strategy import Strategy


class Single(Strategy):
    """One replica of the model, whatever other axes split it."""

    name = "single"
    order = 0
    axis = None
    offloads = ("none", "optimizer", "disk")

    def sums_at_last(self, cfg: RunConfig, itemsizes: Iterable[int]) -> bool:
        """Return whether ranks of `cp` have partial sums, which context parallelism adds up."""
        return cfg.parallel.cp > 1
