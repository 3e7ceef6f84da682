"""Mamba2: heads are dealt out, with the group of B and C that each reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.models.tensor_splits.base import (
    BlockSplit,
    Cut,
    Indivisible,
    Rows,
    Segment,
    Sum,
    depthwise,
    even,
    linear,
)

HEADS = "heads of Mamba2"


def mamba2(block: Any, num_ranks: int) -> BlockSplit:
    """The way in gives [z, x, B, C, dt], one after the other; x, B and C go through the convolution.

    Consecutive heads read one group. With fewer groups than ranks, neighbours hold the same one.
    """
    groups = block.n_groups
    shares = min(num_ranks, groups)
    heads = even(num_ranks, block.num_heads, HEADS)
    if groups % shares or num_ranks % shares:
        raise Indivisible(f"{groups} groups of {HEADS}")
    features = Segment(block.intermediate_size, num_ranks)
    states = Segment(groups * block.ssm_state_size, shares)
    way_in = Rows(num_ranks, (features, features, states, states, *heads.segments))
    channels = Rows(num_ranks, (features, states, states))
    out = Rows(num_ranks, (features,))
    weights = {
        **linear(block, "in_proj", "out", way_in),
        **linear(block, "out_proj", "in", out),
        **depthwise(block, "conv1d", channels),
        **{name: Cut(0, heads) for name in ("A_log", "D", "dt_bias")},
    }
    attributes = {
        "num_heads": heads.local_size,
        "intermediate_size": out.local_size,
        "n_groups": groups // shares,
        "conv_dim": channels.local_size,
        "conv1d.groups": channels.local_size,
    }
    normed = _norm_groups(block)
    spread = 0 < normed < num_ranks
    if normed:
        weights["norm.weight"] = Cut(0, out)
    if hasattr(block.norm, "n_groups"):
        attributes["norm.n_groups"] = groups // shares
    return BlockSplit(
        weights,
        attributes,
        norms={"norm": partial(gated_rms_norm, normed)} if spread else {},
        buffers={"mup_vector": Cut(2, way_in)} if hasattr(block, "mup_vector") else {},
        # mamba_ssm's training kernel ends with a norm over the features that this rank has of a group.
        as_in_evaluation=spread,
    )


def _norm_groups(block: Any) -> int:
    """Over how many groups of features the norm is, each on its own; 0: Falcon-H1 may have none."""
    if not hasattr(block.norm, "weight"):
        return 0
    if hasattr(block.norm, "group_size"):
        return block.intermediate_size // block.norm.group_size
    # In transformers 5.17, Granite's is over all features, whatever their groups.
    return getattr(block.norm, "n_groups", 1)


def gated_rms_norm(num_groups: int, norm: Any, num_features: int, add_up: Sum) -> Callable[..., torch.Tensor]:
    """An RMS norm over each group's features, which several ranks share, before or after they are multiplied by a gate.

    In float32, as transformers' Mamba2 layers have it.
    """
    gate_first = not getattr(norm, "norm_before_gate", False)

    def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide, factor = x.float(), F.silu(gate.float())
        if gate_first:
            wide = wide * factor
        mean_square = add_up(wide.square().sum(-1, keepdim=True), num_groups) * (num_groups / num_features)
        normed = norm.weight * (wide * torch.rsqrt(mean_square + norm.variance_epsilon))
        return (normed if gate_first else normed * factor).to(x.dtype)

    return forward
