"""Mamba (the first): channels of the inner width are dealt out, each of which has a state of its own."""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.base import BlockSplit, Cut, blocked, depthwise, even, linear, unwrapped


def jamba(block: Any, num_ranks: int) -> BlockSplit:
    """In what goes in, x lies before its gate z.

    All channels together give time step, B and C (x_proj), and their norms take them whole.
    """
    width, what = unwrapped(block.get_submodule("out_proj")).in_features, "channels of Mamba"
    channels = even(num_ranks, width, what)
    weights = linear(block, "in_proj", "out", blocked(num_ranks, (width, width), what))
    weights |= depthwise(block, "conv1d", channels)
    weights |= linear(block, "x_proj", "in", channels) | linear(block, "dt_proj", "out", channels)
    weights |= {"A_log": Cut(0, channels), "D": Cut(0, channels)}  # [channels, state] and [channels]
    return BlockSplit(weights | linear(block, "out_proj", "in", channels), summed=("x_proj",))
