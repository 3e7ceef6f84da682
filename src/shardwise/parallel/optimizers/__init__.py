"""The optimizers: each file here has one, of its own name, and loads no torch for its facts."""

from shardwise.config import RunConfig
from shardwise.config.optimizers import OPTIMIZER_NAMES
from shardwise.parallel.registry import in_files
from shardwise.parallel.update_rule import UpdateRule

OPTIMIZERS = in_files(__name__, OPTIMIZER_NAMES, UpdateRule)
"""All by name."""


def update_rule_of(cfg: RunConfig) -> UpdateRule:
    """Return the optimizer of a run."""
    return OPTIMIZERS[cfg.optimizer.name]
