"""One file for each kind of block, which also stands in `KINDS`."""

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

KINDS: tuple[Kind, ...] = (
    *(attention.FULL, attention.SLIDING, attention.LATENT, attention.JOINED),
    *(gated_delta_net.BY_KEY_HEAD, gated_delta_net.JOINED, gated_delta_net.SEPARATE),
    *(
        jet_block.JET_BLOCK,
        kda.KDA,
        mamba.MAMBA,
        mamba2.MAMBA2,
        short_convolution.SHORT_CONVOLUTION,
    ),
    *(feed_forward.MLP, feed_forward.JOINED),
    *(mixture.MIXTURE, mixture.ROUTER, mixture.WITH_GATED_EXPERT),
    *(mixture.WITH_SHARED_EXPERTS, mixture.WITHOUT_GATES),
)
"""All kinds, with their variants."""

SHARED_INPUTS = frozenset(name for kind in KINDS for name in kind.shares_input)
"""Paths of linears that, where they lie in one module, are called with one tensor.

Where that is not so, they cost more than they need and compute the same."""

RATES = frozenset(name.rpartition(".")[2] for kind in KINDS for name in kind.rates)
"""Names of parameters that set how fast a state decays."""
