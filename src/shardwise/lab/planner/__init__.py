"""The planner, which says beforehand what a run needs and takes."""

from shardwise.config import RunConfig

HERE = "here"
"""The name of this machine as devices, as `shardwise calibrate` has measured it."""
MANY_TOKENS = 2**18
"""Tokens of a micro-batch from which on a CPU's run is checked against the machine's memory."""


def chooses(cfg: RunConfig, device_type: str) -> bool:
    """Return whether a run asks the planner before it begins: for a budget of memory, or where a
    CPU may be far too small.
    """
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
    is_huge = device_type == "cpu" and tokens >= MANY_TOKENS
    return is_huge or cfg.training.budget_bytes is not None
