"""Mamba (the first one, arXiv 2312.00752): a selective scan with a state for each channel.

Tensor parallelism shards the channels.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PretrainedConfig

from shardwise.kernels.recurrence import Tokens
from shardwise.kernels.selective_scan import RECURRENCE, backend
from shardwise.kernels.selective_scan.chunked import CHUNK
from shardwise.models.chunks import ChunkFlops, CoreFlops, chunks_of
from shardwise.models.kinds import short_convolution
from shardwise.models.kinds.base import Backend, Carried, Core, Kind, Shapes
from shardwise.models.kinds.short_convolution import CAUSAL_CONVOLUTION, convolved
from shardwise.models.moves import WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
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
    (2 C S): 5 C S, as for Mamba2.

    Run by `kernels/selective_scan/chunked.py`: a forward is the same, of which the read alone
    is a matrix product. A backward computes it again (5 C S). It adds the gradients of what was
    read to those of later states (3 C S), from which it gets those of C, B and x (2 C S each, as
    matrix products), those of the exponents of the decays (2 C S), and theirs of dt and A (2 C S
    each).
    """

    num_channels: int
    state_size: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_channels * self.state_size


def cores(config: PretrainedConfig) -> tuple[Mamba]:
    """Return the core by the config."""
    return (Mamba(config.mamba_expand * config.hidden_size, config.mamba_d_state),)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of x, and a factor and a state for each channel and place of a state."""
    states = prod(shapes["A_log"])
    return Carried(shapes["conv1d.weight"][0], states, states)


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, what the first projection gives, the convolution's output, dt, B, C, states.

    That is once more what goes into the last projection.
    """
    hidden, gate = block.split(block.linear("in_proj", x), (1, 1))
    hidden = convolved(block, hidden)
    channels, states = block.parameters["A_log"].shape
    rank = block.num_in("dt_proj")
    dt, b, c = block.split(block.linear("x_proj", hidden), (rank, states, states))
    dt = block.rms_norm("dt_layernorm.weight", dt, rank)
    b = block.rms_norm("b_layernorm.weight", b, states)
    c = block.rms_norm("c_layernorm.weight", c, states)
    dt = block.linear("dt_proj", dt)
    out = _scanned(block, hidden, dt, b, c, gate, channels * states)
    return block.linear("out_proj", out)


def _scanned(
    block: TapedBlock, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, numel: int
) -> Tensor:
    """Return the outputs of the scan, which keeps its inputs and the state before each chunk."""
    state, chunks = block.rows * numel, chunks_of(block.length, CHUNK)
    rates = block.pointwise(block.as_dtype(block.weight("A_log"), WIDE), keeps_outputs=True)
    names = ("D", "dt_proj.bias")
    weights = [block.scaled(rates), *(block.as_dtype(block.weight(n), WIDE) for n in names)]
    per_channel = block.rows * x.numel // block.tokens
    forward = chunks.in_forward(lambda n: WIDE * n * (4 * state + 2 * per_channel))
    backward = chunks.in_backward(lambda n: WIDE * n * (5 * state + 10 * per_channel))
    # Of all that the scan computes, only what is read of the states is a product.
    # Maps take the states of all tokens, which are not read.
    forward_flops, backward_flops, map_flops = (ChunkFlops(times * numel) for times in (5, 20, 3))
    made = x.num_bytes + WIDE * state
    forward = block.tape.products_within(
        WIDE * x.numel, made, forward, WIDE * chunks.longest * per_channel
    )
    states = block.tape.tensor(chunks.number * state, WIDE)
    out, _ = block.tape.run(
        [x, dt, b, c, gate, *weights],
        [(x.numel, x.itemsize), (state, WIDE)],
        keeps=[x, dt, b, c, gate, states, *weights],
        forward=forward,
        backward=backward,
        flops=CoreFlops(forward_flops, backward_flops, map_flops, map_flops),
    )
    return out


def scan(
    tokens: Tokens,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor,
    delta_softplus: bool,
    return_last_state: bool,
    **flags: Any,
) -> torch.Tensor:
    """Return the outputs of a mixer's scan, and no state: parts are trained without a cache.

    The mixer has tokens last: [B, D, T], and b and c [B, S, T].
    """
    assert delta_softplus
    assert not return_last_state
    x, dt, b, c, z = (y.transpose(1, 2) for y in (x, dt, b, c, z))
    return tokens.recur(RECURRENCE, x, dt, a, b, c, D, z, delta_bias).transpose(1, 2)


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by channels. In the first projection x lies before its gate z.

    All channels together give time step, B and C (x_proj), and their norms take them whole.
    """
    width, what = unwrapped(block.out_proj).in_features, "channels of Mamba"
    channels = even(num_ranks, width, what)
    weights = {
        "A_log": DimCut(0, channels),
        "D": DimCut(0, channels),
    }  # [channels, state], [channels]
    weights |= linear(block, "in_proj", "out", blocked(num_ranks, (width, width), what))
    weights |= depthwise(block, "conv1d", channels)
    weights |= evenly(block, num_ranks, what, out=["dt_proj"], into=("x_proj", "out_proj"))
    return BlockSplit(weights, summed=("x_proj",))


MAMBA = Kind(
    "mamba",
    cores=cores,
    functions={"mamba_selective_scan": scan, **CAUSAL_CONVOLUTION},
    carries=carries,
    activations=activations,
    backends=(
        Backend("selective scan", backend, takes_documents=False, takes_state=False),
        short_convolution.BACKEND,
    ),
    split=split,
    keeps_documents_apart=True,
    gating=("dt_proj",),
    rates=("A_log",),
    # The mixer multiplies by the weight itself, to add the bias only inside the scan.
    bypassed=("dt_proj",),
)
