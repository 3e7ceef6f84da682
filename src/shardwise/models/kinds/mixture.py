"""Mixtures of experts.

Tensor parallelism shards the feed-forward width of every expert alike; routers are whole.
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
    evenly,
    linear,
    unwrapped,
)

BIASES = ("e_score_correction_bias", "expert_bias")
"""What families call the bias on a router's scores that evens out the loads: a buffer."""


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard routed experts, stacked [E, out, in], and one that is shared by all tokens.

    Rows of gate and up lie one after the other in one stack.
    """
    experts = unwrapped(block.experts)
    width, what = experts.down_proj.shape[2], "features of an expert"
    weights = {"experts.down_proj": Cut(2, even(num_ranks, width, what))}
    if hasattr(experts, "gate_up_proj"):
        weights["experts.gate_up_proj"] = Cut(1, blocked(num_ranks, (width, width), what))
    else:
        weights["experts.up_proj"] = Cut(1, even(num_ranks, width, what))
    # Nemotron-H's experts have a narrower width of their own, out of which a linear leads.
    latent = unwrapped(getattr(block, "fc2_latent_proj", None))
    if getattr(latent, "bias", None) is not None:
        # Every rank holds it whole; it is called cut, so that its bias is added by one rank only.
        whole = Rows(num_ranks, (Segment(latent.in_features, 1),))
        weights |= linear(block, "fc2_latent_proj", "in", whole)
    up, down = _shared(feed_forward.UP), _shared(feed_forward.DOWN)
    return BlockSplit(weights | evenly(block, num_ranks, feed_forward.FEATURES, out=up, into=down))


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
"""With routed experts alone, and `gate` for a router.

Some families balance the load by a bias that is added to the routers' scores to choose experts, not
by a loss. That bias (`e_score_correction_bias`, `expert_bias`) is a buffer: no gradient reaches it.
Training keeps it as it is in the base model, in LoRA and in full, and a saved model has it.
"""
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
