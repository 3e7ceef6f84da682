"""`training.checkpointing` as a part of what a search looks up."""

from typing import Any

from shardwise.config import Checkpointing, Recomputation

Recomputed = str | tuple[str, ...] | Recomputation
"""`training.checkpointing`, a list as a tuple."""


def is_budget(choice: Recomputed) -> bool:
    """Return whether layers are chosen by a budget."""
    return isinstance(choice, Recomputation) and choice.budget_gib is not None


def hashable(checkpointing: Checkpointing) -> Recomputed:
    """Return a run file's choice of recomputation as a candidate has it."""
    return tuple(checkpointing) if isinstance(checkpointing, list) else checkpointing


def as_checkpointing(recomputation: Recomputed) -> Any:
    """Return a choice of recomputation as a run file has it."""
    return list(recomputation) if isinstance(recomputation, tuple) else recomputation


def written(checkpointing: Checkpointing) -> Any:
    """Return `training.checkpointing` as a run file has it."""
    if not isinstance(checkpointing, Recomputation):
        return checkpointing
    keys = {key: value for key, value in vars(checkpointing).items() if value}
    return {key: [*v] if isinstance(v, tuple) else v for key, v in keys.items()}
