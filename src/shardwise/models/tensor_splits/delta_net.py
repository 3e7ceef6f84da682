"""Gated DeltaNet: key heads are dealt out, with the value heads that go with each."""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.base import BlockSplit, Cut, Rows, blocked, even, linear, require_divides

HEADS = "key heads of Gated DeltaNet"


def _split(block: Any, num_ranks: int, projections: dict[str, Rows], out: str) -> BlockSplit:
    """What is alike in all: the convolution over [q, k, v], decay rates per value head, and the way out."""
    require_divides(num_ranks, block.num_k_heads, HEADS)
    keys, values = block.key_dim, block.value_dim
    channels = blocked(num_ranks, (keys, keys, values), HEADS)
    per_head = even(num_ranks, block.num_v_heads, "value heads of Gated DeltaNet")
    weights = {
        name: cut for path, rows in projections.items() for name, cut in linear(block, path, "out", rows).items()
    }
    weights |= linear(block, out, "in", even(num_ranks, values, HEADS))
    weights |= {"conv1d.weight": Cut(0, channels), "A_log": Cut(0, per_head), "dt_bias": Cut(0, per_head)}
    attributes = {
        name: getattr(block, name) // num_ranks
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
        if hasattr(block, name)
    }
    return BlockSplit(weights, attributes | {"conv1d.groups": channels.local_size})


def qwen3_next(block: Any, num_ranks: int) -> BlockSplit:
    """q, k, v and z of a key head lie together, and so do its b and a."""
    keys, values, heads = block.key_dim, block.value_dim, block.num_v_heads
    projections = {
        "in_proj_qkvz": even(num_ranks, 2 * keys + 2 * values, HEADS),
        "in_proj_ba": even(num_ranks, 2 * heads, HEADS),
    }
    return _split(block, num_ranks, projections, "out_proj")


def qwen3_5(block: Any, num_ranks: int) -> BlockSplit:
    """q, k and v lie one after the other."""
    keys, values = block.key_dim, block.value_dim
    per_head = even(num_ranks, block.num_v_heads, "value heads of Gated DeltaNet")
    projections = {
        "in_proj_qkv": blocked(num_ranks, (keys, keys, values), HEADS),
        "in_proj_z": even(num_ranks, values, HEADS),
        "in_proj_b": per_head,
        "in_proj_a": per_head,
    }
    return _split(block, num_ranks, projections, "out_proj")


def olmo_hybrid(block: Any, num_ranks: int) -> BlockSplit:
    """Each has a linear of its own."""
    keys, values = (even(num_ranks, size, HEADS) for size in (block.key_dim, block.value_dim))
    per_head = even(num_ranks, block.num_v_heads, "value heads of Gated DeltaNet")
    projections = {
        "q_proj": keys,
        "k_proj": keys,
        "v_proj": values,
        "g_proj": values,
        "a_proj": per_head,
        "b_proj": per_head,
    }
    return _split(block, num_ranks, projections, "o_proj")
