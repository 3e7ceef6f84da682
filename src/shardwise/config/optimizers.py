"""The optimizers that a run may have, and the facts that rules ask of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwise.config.plugins import names_in, plugins

OPTIMIZER_NAMES = names_in("optimizers")
"""The values of `optimizer.name`."""
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[OPTIMIZER_NAMES]


class UpdateFacts:
    """Facts that others may ask of an optimizer: see `parallel/optimizers/`."""

    name: str = ""
    """The value of `optimizer.name`, which is the name of its file."""
    selects: bool = False
    """Whether it updates selected weights by itself, and leaves the others to AdamW."""
    needs_matrices: bool = False
    """Whether its update of a matrix is not one of each element by itself."""
    has_blocks: bool = False
    """Whether it keeps a scale for each block of a row, through which no cut may go."""
    moves_by_rate: bool = True
    """Whether an update of an element is about as large as the learning rate."""
    whole_states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """The states of each trained weight that are as large as it."""


def update_facts(name: str) -> UpdateFacts:
    """Return the facts of an optimizer."""
    return plugins("optimizers")[name]
