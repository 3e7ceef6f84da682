"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the delta rule with a decay for each
channel.

Tensor parallelism shards the heads. Where a projection has two factors, all heads share the result
of the first one, which is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from shardwise.models.kinds.base import Kind
from shardwise.models.tensor_cuts import (
    BlockSplit,
    Cut,
    blocked,
    depthwise,
    even,
    linear,
    require_divides,
)


@dataclass(frozen=True)
class KimiDeltaAttention:
    """The delta rule with a decay per channel (arXiv 2510.26692): N heads, with a state of H x H
    per head.

    Model FLOPs, the recurrence on one token: as in Gated DeltaNet, whose decay is one number per
    head, 7 N H^2.

    Executed, per head and chunk of C tokens. As matrix products: the inverted system times values
    and keys, and weights times new values (2 C^2 H each); the state read by keys and by queries and
    then updated (2 C H^2 each). Written out with elements, as the decay lies inside the sums, so
    that torch's FLOP counter counts 0: k k^T and q k^T (2 C^2 H each) and the inversion row by row
    (2 i^2 for row i: C (C - 1) (2 C - 1) / 3). The backward has two products for each, less what
    has no gradient: as in Gated DeltaNet, 8 C H^2 per sequence.
    """

    num_heads: int
    head_dim: int
    chunk_size: int = 64

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.head_dim**2

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(sequence_length, self._per_chunk())

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(
            sequence_length, 2 * self._per_chunk(), -8 * self.chunk_size * self.head_dim**2
        )

    def _per_chunk(self) -> int:
        c, h = self.chunk_size, self.head_dim
        return 10 * c * c * h + 6 * c * h * h + c * (c - 1) * (2 * c - 1) // 3

    def _per_token(self, sequence_length: int, per_chunk: int, per_sequence: int = 0) -> float:
        chunks = -(-sequence_length // self.chunk_size)
        return self.num_heads * (chunks * per_chunk + per_sequence) / sequence_length


def core(config: PretrainedConfig) -> KimiDeltaAttention:
    """Return the core by the config."""
    return KimiDeltaAttention(config.linear_num_heads, config.linear_head_dim)


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by heads: q, k, v, the gate of the output and the decay have H features a head.

    The convolution runs over [q, k, v].
    """
    width, num_heads, what = block.qkv_dim, block.num_heads, "heads of Kimi Delta Attention"
    require_divides(num_ranks, num_heads, what)
    per_head, features = even(num_ranks, num_heads, what), even(num_ranks, width, what)
    weights = {
        "forget_gate.dt_bias": Cut(0, features),
        "forget_gate.A_log": Cut(2, per_head),
    }  # [N H] and [1, 1, N, 1]
    for name in ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj"):
        weights |= linear(block, name, "out", features)
    weights |= linear(block, "b_proj", "out", per_head) | linear(block, "o_proj", "in", features)
    weights |= depthwise(block, "conv1d", blocked(num_ranks, (width, width, width), what))
    return BlockSplit(weights, {"qkv_dim": width // num_ranks})


KDA = Kind(
    "kda",
    before=(
        ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj"),
        ("conv1d", "forget_gate.A_log", "forget_gate.dt_bias"),
        ("g_b_proj", "forget_gate.f_b_proj"),
    ),
    after=(("o_norm",), ("o_proj",)),
    core=core,
    split=split,
    keeps_documents_apart=True,
    shares_input=("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj"),
    ends=("o_proj",),
    gating=("forget_gate.f_a_proj", "forget_gate.f_b_proj", "b_proj"),
    rates=("forget_gate.A_log",),
)
