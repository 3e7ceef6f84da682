"""Kimi Linear's mixers: heads are dealt out, both of Kimi Delta Attention and of latent attention.

Where a projection has two factors, the first one, which all heads share, is held whole.
"""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.attention import latent_attention
from shardwise.models.tensor_splits.base import BlockSplit, Cut, blocked, depthwise, even, linear, require_divides


def kimi_linear(block: Any, num_ranks: int) -> BlockSplit:
    """One kind of mixer in some layers and the other in others."""
    return delta_attention(block, num_ranks) if hasattr(block, "forget_gate") else latent_attention(block, num_ranks)


def delta_attention(block: Any, num_ranks: int) -> BlockSplit:
    """q, k, v, the output's gate and the decay have H features a head; the convolution runs over [q, k, v]."""
    width, num_heads, what = block.qkv_dim, block.num_heads, "heads of Kimi Delta Attention"
    require_divides(num_ranks, num_heads, what)
    per_head, features = even(num_ranks, num_heads, what), even(num_ranks, width, what)
    weights = {"forget_gate.dt_bias": Cut(0, features), "forget_gate.A_log": Cut(2, per_head)}  # [N H] and [1, 1, N, 1]
    for name in ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj"):
        weights |= linear(block, name, "out", features)
    weights |= linear(block, "b_proj", "out", per_head) | linear(block, "o_proj", "in", features)
    weights |= depthwise(block, "conv1d", blocked(num_ranks, (width, width, width), what))
    return BlockSplit(weights, {"qkv_dim": width // num_ranks})
