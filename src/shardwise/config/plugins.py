"""Strategies and optimizers, which are found as files of `parallel/` and asked by their names.

Everything else here and in `base/` leads to nothing above it: docs/decisions/036-rooms.md.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

Folder = Literal["strategies", "optimizers"]
PARALLEL = Path(__file__).parents[1] / "parallel"


def names_in(folder: Folder) -> tuple[str, ...]:
    """Return the names of the files of a folder of `parallel/`, none of which is loaded."""
    return tuple(file.name for file in iter_modules([str(PARALLEL / folder)]))


@cache  # a search asks for strategies many thousand times
def plugins(folder: Folder) -> dict[str, Any]:
    """Return what a folder of `parallel/` has, by its names; it is loaded as a run needs it."""
    return vars(import_module(f"shardwise.parallel.{folder}"))[folder.upper()]
