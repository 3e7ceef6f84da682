"""One file for each kind of block; its variants are the instances of `Kind` in it."""

from importlib import import_module
from pkgutil import iter_modules

from shardwise.models.kinds.base import Kind

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_NAMED = (value for file in _FILES for value in vars(file).values())
KINDS = tuple(dict.fromkeys(kind for kind in _NAMED if isinstance(kind, Kind)))
"""All kinds, with their variants."""

SHARED_INPUTS = frozenset(name for kind in KINDS for name in kind.shares_input)
"""Paths of linears that, where they lie in one module, are called with one tensor.

Where that is not so, they cost more than they need and compute the same."""

RATES = frozenset(name.rpartition(".")[2] for kind in KINDS for name in kind.rates)
"""Names of parameters that set how fast a state decays."""
