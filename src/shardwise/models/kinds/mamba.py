"""Mamba (the first one, arXiv 2312.00752): a selective scan with a state for each channel.

Tensor parallelism shards the channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from shardwise.models.kinds.base import Core, Kind
from shardwise.models.kinds.short_convolution import CAUSAL_CONVOLUTION
from shardwise.models.tensor_cuts import (
    BlockSplit,
    Cut,
    blocked,
    depthwise,
    even,
    evenly,
    linear,
    unwrapped,
)


@dataclass(frozen=True)
class Mamba(Core):
    """The selective scan of Mamba (arXiv 2312.00752): C channels, each with a state of S.

    Model FLOPs, the recurrence on one token: decay the state (C S), add x B^T (2 C S), read with C
    (2 C S): 5 C S, as for Mamba2. Executed: the same, token by token; the read alone is a matrix
    product.
    """

    num_channels: int
    state_size: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_channels * self.state_size


def cores(config: PretrainedConfig) -> tuple[Mamba]:
    """Return the core by the config."""
    return (Mamba(config.mamba_expand * config.hidden_size, config.mamba_d_state),)


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by channels. In the first projection x lies before its gate z.

    All channels together give time step, B and C (x_proj), and their norms take them whole.
    """
    width, what = unwrapped(block.out_proj).in_features, "channels of Mamba"
    channels = even(num_ranks, width, what)
    weights = {"A_log": Cut(0, channels), "D": Cut(0, channels)}  # [channels, state], [channels]
    weights |= linear(block, "in_proj", "out", blocked(num_ranks, (width, width), what))
    weights |= depthwise(block, "conv1d", channels)
    weights |= evenly(block, num_ranks, what, out=["dt_proj"], into=("x_proj", "out_proj"))
    return BlockSplit(weights, summed=("x_proj",))


MAMBA = Kind(
    "mamba",
    before=(
        ("in_proj",),
        ("conv1d", "A_log", "D"),
        ("x_proj",),
        ("dt_layernorm", "b_layernorm", "c_layernorm"),
        ("dt_proj",),
    ),
    after=(("out_proj",),),
    cores=cores,
    functions=CAUSAL_CONVOLUTION,
    split=split,
    keeps_documents_apart=True,
    ends=("out_proj",),
    gating=("dt_proj",),
    rates=("A_log",),
    # The mixer multiplies by the weight itself, to add the bias only inside the scan.
    bypassed=("dt_proj",),
)
