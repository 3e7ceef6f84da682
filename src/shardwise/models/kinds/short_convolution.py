"""LFM2's short convolution, gated before and after. Tensor parallelism shards the channels."""

from __future__ import annotations

from typing import Any

from shardwise.models.kinds.base import Kind
from shardwise.models.tensor_cuts import BlockSplit, blocked, depthwise, even, linear, unwrapped


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by channels, each of which is gated and convolved by itself.

    B, C and x lie one after the other in the first projection.
    """
    width, what = unwrapped(block.out_proj).in_features, "channels of a short convolution"
    channels = even(num_ranks, width, what)
    return BlockSplit(
        linear(block, "in_proj", "out", blocked(num_ranks, (width, width, width), what))
        | depthwise(block, "conv", channels)
        | linear(block, "out_proj", "in", channels)
    )


SHORT_CONVOLUTION = Kind(
    "short_convolution",
    before=(("in_proj",), ("conv",)),  # a weight like any other, so there is no core
    after=(("out_proj",),),
    split=split,
    keeps_documents_apart=True,
    ends=("out_proj",),
)
