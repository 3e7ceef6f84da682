"""Jet-Nemotron: JetBlock, full and sliding-window attention, one of them in each layer, then an MLP."""

from shardwise.models.families.base import SOFTMAX, Family
from shardwise.models.tensor_splits.feed_forward import feed_forward

JET_NEMOTRON = Family(
    "jet_nemotron",
    mixers={"linear_attention": "jet_block", **SOFTMAX},
    token_mixers=dict.fromkeys(("jet_block", *SOFTMAX), ("self_attn",)),
    splits={"self_attn": None, "mlp": feed_forward},
    gating=("self_attn.a_proj", "self_attn.b_proj"),
)
