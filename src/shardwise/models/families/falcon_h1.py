"""Falcon-H1: Mamba2 and full attention side by side on the same input in every layer, then an MLP."""

from shardwise.models.families.base import Cut, Family
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.feed_forward import mlp
from shardwise.models.tensor_splits.mamba2 import mamba2

FALCON_H1 = Family(
    "falcon_h1",
    norm="model.final_layernorm",
    logits_multiplied_by="lm_head_multiplier",
    mixers={"hybrid": "attention_and_mamba2"},
    token_mixers={"attention_and_mamba2": ("self_attn", "mamba")},
    feed_forward=("feed_forward",),
    splits={"self_attn": attention, "mamba": mamba2, "feed_forward": mlp},
    cut=Cut(layers_return_tuples=True),
    # mamba_ssm's training kernel ends with the output projection and takes its weight as an argument.
    bypassed=("mamba.out_proj",),
)
