"""The data-parallel strategies: each file here has one, of its own name.

No file loads torch before it has something to do with it: whoever wants names loads none.
"""

from shardwise.base.layouts import ALONE
from shardwise.config import STRATEGY_NAMES, RunConfig
from shardwise.parallel.registry import in_files
from shardwise.parallel.strategy import Strategy

STRATEGIES = dict(
    sorted(in_files(__name__, STRATEGY_NAMES, Strategy).items(), key=lambda item: item[1].order)
)
"""All by name, the simplest first."""
assert [name for name, strategy in STRATEGIES.items() if strategy.axis is None] == [ALONE]


def strategy_of(cfg: RunConfig) -> Strategy:
    """Return the strategy of a run."""
    return STRATEGIES[cfg.parallel.data]
