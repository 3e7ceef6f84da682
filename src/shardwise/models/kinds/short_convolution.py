"""LFM2's short convolution, gated before and after. Tensor parallelism shards the channels."""

from typing import Any

import torch
from transformers import PretrainedConfig

from shardwise.kernels.recurrence import Tokens
from shardwise.kernels.short_conv import backend, short_conv
from shardwise.kernels.short_conv.shifted import BLOCK
from shardwise.models.kinds.base import Backend, Carried, Kind, Shapes
from shardwise.models.moves import WIDE, convolution
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
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


class Uncut:
    """The output [B, D, T] of a convolution, of which a mixer takes the last T tokens, so all.

    A slice of a tensor has a backward even if it cuts nothing off: it copies the gradient into
    tokens-last order. On a CPU that takes a tenth of the layer's time in rows of 32,768 tokens.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """Take the output."""
        self._x = x

    def __getitem__(self, places: tuple[slice, slice, slice]) -> torch.Tensor:
        """Return the places of the output."""
        is_uncut = places == (slice(None), slice(None), slice(-self._x.shape[2], None))
        return self._x if is_uncut else self._x[places]


def uncut_convolution(tokens: Tokens, x: torch.Tensor, weight: torch.Tensor, **flags: Any) -> Uncut:
    """Return `causal_convolution` for a mixer that takes the last T tokens of it."""
    return Uncut(causal_convolution(tokens, x, weight, **flags))


def convolved(block: TapedBlock, x: Tensor, name: str = "conv1d", has_silu: bool = True) -> Tensor:
    """Return the convolution of x, which keeps x alone; see kernels/short_conv.

    On a CPU it works in 32 bits on 64 tokens at a time: on their sums and a product with one tap in
    the forward, and on twice as many in the backward.
    """
    channels, _, width = block.parameters[f"{name}.weight"].shape
    tokens = block.rows * min(BLOCK, block.length)
    wide = tokens * channels * WIDE
    copied = wide if x.itemsize < WIDE else 0
    names = [n for n in (f"{name}.weight", f"{name}.bias") if n in block.parameters]
    weights = [block.weight(n) for n in names]
    moves, moves_back = convolution(
        x.numel,
        x.itemsize,
        width,
        bias=len(names) > 1,
        silu=has_silu,
        is_trained=weights[0].slot is not None,
        in_one=not block.on_cpu,
    )
    forward, backward = 2 * wide + copied, 4 * wide + copied + 5 * width * channels * WIDE
    if not block.on_cpu:
        forward, backward = 0, has_silu * x.num_bytes
    return block.tape.run(
        [x, *weights],
        [(x.numel, x.itemsize)],
        keeps=[x],
        forward=forward,
        backward=backward,
        mixes=True,
        forward_moves=moves,
        backward_moves=moves_back,
    )[0]


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep B, C and x of the first projection, B x, its convolution, and the last one's input."""
    b, c, x = block.split(block.linear("in_proj", x), (1, 1, 1))
    hidden = block.product(b, x)
    hidden = convolved(block, hidden, "conv", has_silu=False)
    y = block.product(c, hidden)
    return block.linear("out_proj", y)


CAUSAL_CONVOLUTION = {"causal_conv1d_fn": causal_convolution}
"""`Kind.functions` of mixers with a short convolution, each of which has this name for it."""
UNCUT_CONVOLUTION = {"causal_conv1d_fn": uncut_convolution}
"""The same where the mixer cuts off what a cache puts before the tokens, also without a cache."""
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
    functions=CAUSAL_CONVOLUTION,
    carries=carries,
    activations=activations,
    backends=(BACKEND,),
    split=split,
    keeps_documents_apart=True,
)
