"""JetBlock: a gated delta rule whose values pass a convolution with kernels generated from the
input.

Tensor parallelism shards the heads. What generates the kernels of a token has two factors: all
heads share the result of the first one, which is whole on every rank; of the second one the rows of
a head, W of each of its value channels, lie together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from shardwise.models.kinds import gated_delta_net
from shardwise.models.kinds.base import Both, Kind
from shardwise.models.tensor_cuts import BlockSplit, Cut, even, linear, unwrapped

HEADS = "heads of JetBlock"


@dataclass(frozen=True)
class DynamicConvolution:
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

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.model_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.model_forward(sequence_length)


def core(config: PretrainedConfig) -> Both:
    """Return the core by the config: the convolution, then the rule."""
    rule = gated_delta_net.core(config)
    return Both(DynamicConvolution(rule.num_heads * rule.value_dim, config.jet["conv_size"]), rule)


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by heads, each of which has its own queries, keys, values, gate, decay and state.

    The norm over one head is whole on every rank.
    """
    per_head = even(num_ranks, block.A_log.numel(), HEADS)
    weights = {name: Cut(0, per_head) for name in ("A_log", "dt_bias")}
    for path in (
        "q_proj",
        "k_proj",
        "v_proj",
        "g_proj",
        "a_proj",
        "b_proj",
        "dynamic_conv1d.kernel_generator.w2",
    ):
        features = even(num_ranks, unwrapped(block.get_submodule(path)).out_features, HEADS)
        weights |= linear(block, path, "out", features)
    values = even(num_ranks, unwrapped(block.get_submodule("o_proj")).in_features, HEADS)
    return BlockSplit(weights | linear(block, "o_proj", "in", values))


FIRST = (
    "q_proj",
    "k_proj",
    "v_proj",
    "a_proj",
    "b_proj",
    "g_proj",
    "dynamic_conv1d.kernel_generator.w1",
)
JET_BLOCK = Kind(
    "jet_block",
    before=(FIRST, ("dynamic_conv1d.kernel_generator.w2", "A_log", "dt_bias")),
    after=(("o_norm",), ("o_proj",)),
    core=core,
    split=split,
    keeps_documents_apart=True,
    shares_input=FIRST,
    ends=("o_proj",),
    gating=("a_proj", "b_proj"),
    rates=("A_log",),
)
