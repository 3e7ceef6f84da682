"""Mixtures of experts. Tensor parallelism shards the feed-forward width of every expert alike;
routers are whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.models.kinds import feed_forward
from shardwise.models.kinds.base import Kind
from shardwise.models.tensor_cuts import (
    BlockSplit,
    Cut,
    Rows,
    Segment,
    blocked,
    even,
    linear,
    unwrapped,
)


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard routed experts, stacked [E, out, in], and one that is shared by all tokens.

    Rows of gate and up lie one after the other in one stack.
    """
    experts = unwrapped(block.experts)
    weights: dict[str, Cut] = {}
    width = experts.down_proj.shape[2]
    if hasattr(experts, "gate_up_proj"):
        weights["experts.gate_up_proj"] = Cut(
            1, blocked(num_ranks, (width, width), "features of an expert")
        )
    else:
        weights["experts.up_proj"] = Cut(1, even(num_ranks, width, "features of an expert"))
    weights["experts.down_proj"] = Cut(2, even(num_ranks, width, "features of an expert"))
    latent = getattr(
        block, "fc2_latent_proj", None
    )  # Nemotron-H, where experts have a narrower width of their own
    if getattr(latent, "bias", None) is not None:
        # Held whole, but called a share, so that its bias is added once and not on each rank.
        weights |= linear(
            block,
            "fc2_latent_proj",
            "in",
            Rows(num_ranks, (Segment(unwrapped(latent).in_features, 1),)),
        )
    for name in ("shared_expert", "shared_experts"):
        if hasattr(block, name):
            weights |= feed_forward.cuts(block, name, num_ranks)
    return BlockSplit(weights)


def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        f"{shared}.{name}" for shared in ("shared_expert", "shared_experts") for name in names
    )


MIXTURE = Kind(
    "moe",
    before=(
        (
            *("gate", "router", "shared_expert_gate", "fc1_latent_proj", "experts.gate_up_proj"),
            *_shared(("gate_proj", "up_proj")),
        ),
        ("experts.up_proj", *_shared(("down_proj",))),
        ("experts.down_proj",),
        ("fc2_latent_proj",),
    ),
    split=split,
    mixes_tokens=False,
    keeps_more=False,
    gating=("gate",),
    experts=("experts.gate_up_proj", "experts.down_proj"),
)
"""With routed experts alone, and `gate` for a router."""
ROUTER = replace(MIXTURE, gating=("router",))
"""With routed experts alone, and `router` for a router."""
WITH_GATED_EXPERT = replace(
    MIXTURE, gates=("shared_expert_gate",), gating=("gate", "shared_expert_gate")
)
"""With an expert for all tokens, which a score of its own weighs."""
WITH_SHARED_EXPERTS = replace(MIXTURE, ends=("shared_experts.down_proj",))
"""With experts for all tokens, whose output is added as it is, after that of the routed ones."""
WITHOUT_GATES = replace(WITH_SHARED_EXPERTS, experts=("experts.up_proj", "experts.down_proj"))
"""The same, with experts of two matrices."""
