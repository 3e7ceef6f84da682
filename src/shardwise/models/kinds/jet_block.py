"""JetBlock: a gated delta rule whose values pass a convolution with generated kernels.

Tensor parallelism shards the heads. What generates the kernels of a token has two factors: all
heads share the result of the first one, which is whole on every rank; of the second one the rows of
a head, W of each of its value channels, lie together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from shardwise.kernels.dynamic_conv import dynamic_conv
from shardwise.kernels.gated_delta_rule import RECURRENCE
from shardwise.kernels.recurrence import Tokens
from shardwise.models.chunks import ChunkFlops, CoreFlops
from shardwise.models.kinds import gated_delta_net
from shardwise.models.kinds.base import Backend, Carried, Core, Kind, Shapes
from shardwise.models.kinds.delta_rule import rule_carries
from shardwise.models.kinds.gated_delta_net import GatedDeltaNet
from shardwise.models.moves import WIDE, generated_convolution
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import BlockSplit, DimCut, even, evenly

HEADS = "heads of JetBlock"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
GENERATOR = ("dynamic_conv1d.kernel_generator.w1", "dynamic_conv1d.kernel_generator.w2")
"""The two factors of what generates the kernels."""


@dataclass(frozen=True)
class DynamicConvolution(Core):
    """A convolution of C channels whose kernel of W taps is an activation: another one for each
    token and channel.

    A tap is a multiply-add, so a forward is 2 W C; a backward has as much for the values and as
    much for the kernels. All of it is elementwise, so that torch's FLOP counter counts 0. (What
    generates the kernels are linears.)
    """

    num_channels: int
    width: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.num_channels * self.width


def cores(config: PretrainedConfig) -> tuple[DynamicConvolution, GatedDeltaNet]:
    """Return the convolution and the rule by the config."""
    (rule,) = gated_delta_net.cores(config)
    convolution = DynamicConvolution(rule.num_heads * rule.value_dim, config.jet["conv_size"])
    return convolution, rule


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of the values, and what the gated delta rule passes on."""
    (_, rule), num_heads = cores(config), shapes["A_log"][0]
    return rule_carries(rule, num_heads, num_heads * rule.value_dim)


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep what a Gated DeltaNet keeps, without its convolution, and the generated kernels.

    The convolution keeps the values and W taps for each of them; silu keeps queries and keys.
    """
    _, rule = cores(block.config)
    generator = "dynamic_conv1d.kernel_generator"
    q, k, values, a, b, gate, between = block.linears((*PROJECTIONS, f"{generator}.w1"), x)
    kernels = block.linear(f"{generator}.w2", block.pointwise(between, [between]))
    wide, width = values.numel * WIDE, kernels.numel // values.numel
    taps = kernels.numel // block.tokens
    moves, moves_back = generated_convolution(values.numel, values.itemsize, width)
    v = block.tape.run(
        [values, kernels],
        [(values.numel, values.itemsize)],
        keeps=[values, kernels],
        forward=2 * wide,
        backward=4 * wide,
        flops=CoreFlops(ChunkFlops(2 * taps), ChunkFlops(4 * taps)),
        forward_moves=moves,
        backward_moves=moves_back,
    )[0]
    del values, between, kernels
    q, k = block.pointwise(q, [q]), block.pointwise(k, [k])
    beta = block.pointwise(b, keeps_outputs=True)
    g = gated_delta_net.decay(block, a)
    out = gated_delta_net.gated_outputs(block, rule, [q, k, v], g, beta)
    return block.linear("o_proj", block.gated_norm("o_norm.weight", out, gate))


def convolution(
    tokens: Tokens, values: torch.Tensor, kernels: torch.Tensor, activation: str
) -> torch.Tensor:
    """Return [B, T, D] of values [B, T, D] and kernels [B, T, D, W]."""
    earlier, documents = tokens.earlier(values, kernels.shape[-1] - 1)
    if earlier is not None:
        values = torch.cat([earlier, values], 1)
    return dynamic_conv(values, kernels, activation, documents)


def delta_rule(
    tokens: Tokens,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Return the outputs of the rule, and no state: parts are trained without a cache."""
    assert state is None
    return tokens.recur(RECURRENCE, q, k, v, g, beta), None


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by heads, each of which has its own queries, keys, values, gate, decay and state.

    The norm over one head is whole on every rank.
    """
    per_head = even(num_ranks, block.A_log.numel(), HEADS)
    weights = {name: DimCut(0, per_head) for name in ("A_log", "dt_bias")}
    weights |= evenly(block, num_ranks, HEADS, out=(*PROJECTIONS, GENERATOR[1]), into=["o_proj"])
    return BlockSplit(weights)


CONVOLUTION_BACKEND = Backend(
    "dynamic convolution", lambda device, dtype: "torch", is_slow_in_torch=False
)
"""No package that is asked for kernels has one: it is a product by elements for each tap."""
JET_BLOCK = Kind(
    "jet_block",
    cores=cores,
    functions={"dynamic_conv": convolution, "gated_delta_rule": delta_rule},
    width=lambda block: block.dynamic_conv1d.width,
    carries=carries,
    activations=activations,
    split=split,
    backends=(gated_delta_net.RULE_BACKEND, CONVOLUTION_BACKEND),
    keeps_documents_apart=True,
    shares_input=(*PROJECTIONS, GENERATOR[0]),
    gating=("a_proj", "b_proj"),
    rates=("A_log",),
)
