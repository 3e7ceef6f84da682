"""Jet-Nemotron's mixers: heads are dealt out, of JetBlock and of attention.

What makes JetBlock's kernels of a token has two factors: of the first one all heads share the result, so it is held
whole; of the second one a head's rows, W of each of its value channels, lie together.
"""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.base import BlockSplit, Cut, even, linear, unwrapped

HEADS = "heads of JetBlock"


def jet_nemotron(block: Any, num_ranks: int) -> BlockSplit:
    """One kind of mixer in some layers and the other in others."""
    return jet_block(block, num_ranks) if hasattr(block, "dynamic_conv1d") else attention(block, num_ranks)


def jet_block(block: Any, num_ranks: int) -> BlockSplit:
    """Every head has its own queries, keys, values, gate, decay and state; the norm over one head is held whole."""
    per_head = even(num_ranks, block.A_log.numel(), HEADS)
    weights = {name: Cut(0, per_head) for name in ("A_log", "dt_bias")}
    for path in ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "dynamic_conv1d.kernel_generator.w2"):
        features = even(num_ranks, unwrapped(block.get_submodule(path)).out_features, HEADS)
        weights |= linear(block, path, "out", features)
    values = even(num_ranks, unwrapped(block.get_submodule("o_proj")).in_features, HEADS)
    return BlockSplit(weights | linear(block, "o_proj", "in", values))
