"""One file for each kind of block; its variants are the instances of `Kind` in it."""

from shardwise.models.kinds import (
    attention,
    feed_forward,
    gated_delta_net,
    jet_block,
    kda,
    mamba,
    mamba2,
    mixture,
    short_convolution,
)
from shardwise.models.kinds.base import Kind

_MIXERS = (attention, gated_delta_net, jet_block, kda, mamba, mamba2, short_convolution)
_FILES = (*_MIXERS, feed_forward, mixture)
KINDS = tuple(kind for file in _FILES for kind in vars(file).values() if isinstance(kind, Kind))
"""All kinds, with their variants."""

SHARED_INPUTS = frozenset(name for kind in KINDS for name in kind.shares_input)
"""Paths of linears that, where they lie in one module, are called with one tensor.

Where that is not so, they cost more than they need and compute the same."""

RATES = frozenset(name.rpartition(".")[2] for kind in KINDS for name in kind.rates)
"""Names of parameters that set how fast a state decays."""
