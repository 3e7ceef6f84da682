"""Jet-Nemotron: JetBlock, full and sliding-window attention, one of them in each layer, then an MLP."""

from shardwise.models.families.base import SOFTMAX, SPLITS, Family
from shardwise.models.tensor_splits import jet_block

JET_NEMOTRON = Family(
    "jet_nemotron",
    mixers={"linear_attention": "jet_block", **SOFTMAX},
    token_mixers=dict.fromkeys(("jet_block", *SOFTMAX), ("self_attn",)),
    splits=SPLITS | {"self_attn": jet_block.jet_nemotron},
    gating=("self_attn.a_proj", "self_attn.b_proj"),
)
