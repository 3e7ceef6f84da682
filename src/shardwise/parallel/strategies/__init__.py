"""The data-parallel strategies: each file here has one, of its own name.

No file loads torch before it has something to do with it: whoever wants names loads none.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isclass

from shardwise.config import STRATEGY_NAMES, RunConfig
from shardwise.parallel.strategy import Strategy


def _in_file(name: str) -> Strategy:
    values = vars(import_module(f"{__name__}.{name}")).values()
    (strategy,) = (
        value
        for value in values
        if isclass(value) and issubclass(value, Strategy) and value.name == name
    )
    return strategy()


STRATEGIES = {
    strategy.name: strategy
    for strategy in sorted(map(_in_file, STRATEGY_NAMES), key=lambda strategy: strategy.order)
}
"""All by name, the simplest first."""


def strategy_of(cfg: RunConfig) -> Strategy:
    """Return the strategy of a run."""
    return STRATEGIES[cfg.parallel.data]
