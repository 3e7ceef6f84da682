"""LFM2's short convolution, gated before and after. Tensor parallelism shards the channels."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from shardwise.kernels.recurrence import Tokens
from shardwise.kernels.short_conv import backend, short_conv
from shardwise.models.kinds.base import Backend, Carried, Kind, Shapes
from shardwise.models.tensor_cuts import BlockSplit, blocked, depthwise, even, linear, unwrapped


def causal_convolution(
    tokens: Tokens,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **flags: Any,
) -> torch.Tensor:
    """Return what transformers' `causal_conv1d_fn` does, [B, D, T] of x [B, D, T]."""
    x = x.transpose(1, 2)
    earlier, documents = tokens.earlier(x, weight.shape[1] - 1)
    return short_conv(x, weight, bias, activation, earlier, documents).transpose(1, 2)


CAUSAL_CONVOLUTION = {"causal_conv1d_fn": causal_convolution}
"""`Kind.functions` of mixers with a short convolution, each of which has this name for it."""
BACKEND = Backend("short convolution", backend, is_slow_in_torch=False)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of the convolution."""
    return Carried(shapes["conv.weight"][0])


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
    functions=CAUSAL_CONVOLUTION,
    carries=carries,
    backends=(BACKEND,),
    split=split,
    keeps_documents_apart=True,
    ends=("out_proj",),
)
