"""LFM2's short convolution: channels are dealt out."""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.base import BlockSplit, blocked, depthwise, even, linear, unwrapped


def short_convolution(block: Any, num_ranks: int) -> BlockSplit:
    """B, C and x lie one after the other in what goes in; each channel is gated and convolved by itself."""
    width, what = unwrapped(block.get_submodule("out_proj")).in_features, "channels of a short convolution"
    channels = even(num_ranks, width, what)
    return BlockSplit(
        linear(block, "in_proj", "out", blocked(num_ranks, (width, width, width), what))
        | depthwise(block, "conv", channels)
        | linear(block, "out_proj", "in", channels)
    )
