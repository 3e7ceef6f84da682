"""Softmax attention: heads are dealt out."""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.base import (
    BlockSplit,
    Cut,
    Indivisible,
    Rows,
    Segment,
    blocked,
    even,
    linear,
    require_divides,
    rms_norm,
    unwrapped,
)


def attention(block: Any, num_ranks: int) -> BlockSplit:
    """q, k, v by heads, o by what they give: the shape of most families, with grouped heads or without.

    With fewer key/value heads than ranks, neighbours hold the same one. Norms of q and k over a head are held whole;
    those over all heads are cut.
    """
    head_dim = block.head_dim
    leaves = "o_proj" if hasattr(block, "o_proj") else "out_proj"
    num_heads = unwrapped(block.get_submodule(leaves)).in_features // head_dim
    num_kv_heads = unwrapped(block.get_submodule("v_proj")).out_features // head_dim
    require_divides(num_ranks, num_heads, "attention heads")
    shares = min(num_ranks, num_kv_heads)
    if num_kv_heads % shares or num_ranks % shares:
        raise Indivisible(f"{num_kv_heads} key/value heads")
    # A head of q may come with as many features for its gate.
    queries = even(num_ranks, unwrapped(block.get_submodule("q_proj")).out_features, "query features")
    keys = Rows(num_ranks, (Segment(num_kv_heads * head_dim, shares),))
    out = even(num_ranks, num_heads * head_dim, "attention heads")
    weights = {
        **linear(block, "q_proj", "out", queries),
        **linear(block, "k_proj", "out", keys),
        **linear(block, "v_proj", "out", keys),
        **linear(block, leaves, "in", out),
    }
    norms = {}
    for name, rows in (("q_norm", queries), ("k_norm", keys)):
        norm = getattr(block, name, None)
        if norm is not None and norm.weight.numel() == rows.size and rows.size != head_dim:
            weights[f"{name}.weight"] = Cut(0, rows)
            norms[name] = rms_norm
    groups = {"num_key_value_groups": num_heads // num_ranks * shares // num_kv_heads}
    return BlockSplit(weights, groups, norms)


def latent_attention(block: Any, num_ranks: int) -> BlockSplit:
    """Keys and values (and queries, if they have a rank) are made of a latent that all heads share and is whole."""
    require_divides(num_ranks, block.num_heads, "attention heads")
    weights: dict[str, Cut] = {}
    for name, head_dim, features in (
        ("q_proj", block.qk_head_dim, "out"),
        ("q_b_proj", block.qk_head_dim, "out"),
        ("kv_b_proj", block.qk_nope_head_dim + block.v_head_dim, "out"),
        ("o_proj", block.v_head_dim, "in"),
    ):
        weights |= linear(block, name, features, even(num_ranks, block.num_heads * head_dim, "attention heads"))
    return BlockSplit(weights)


def gpt2_attention(block: Any, num_ranks: int) -> BlockSplit:
    """q, k and v lie one after the other in one Conv1D."""
    require_divides(num_ranks, block.num_heads, "attention heads")
    width = block.embed_dim
    weights = {
        **linear(block, "c_attn", "out", blocked(num_ranks, (width, width, width), "query features")),
        **linear(block, "c_proj", "in", even(num_ranks, width, "attention features")),
    }
    return BlockSplit(weights, {"split_size": width // num_ranks, "num_heads": block.num_heads // num_ranks})
