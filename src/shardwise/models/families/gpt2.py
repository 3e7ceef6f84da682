"""GPT-2: learned positions; its linears are transformers' Conv1D, which keep their weight as [in, out]."""

from shardwise.models.families.base import Cut, Family
from shardwise.models.tensor_splits.attention import gpt2_attention
from shardwise.models.tensor_splits.feed_forward import mlp

GPT2 = Family(
    "gpt2",
    embed="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="attn",
    splits={"attn": gpt2_attention, "mlp": mlp},
    cut=Cut(dropout="transformer.drop"),
    # No token_mixers: positions are added before the first layer and run on from one document to the next.
)
