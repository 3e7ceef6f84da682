"""The optimizers that a run may have, and the facts that rules ask of one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

_FOLDER = Path(__file__).parents[1] / "parallel" / "optimizers"
OPTIMIZER_NAMES = tuple(file.name for file in iter_modules([str(_FOLDER)]))
"""The values of `optimizer.name`: each is a file, which is not loaded for its name."""
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
    """Return the facts of an optimizer, whose file is found as the run needs it."""
    return import_module("shardwise.parallel.optimizers").OPTIMIZERS[name]
