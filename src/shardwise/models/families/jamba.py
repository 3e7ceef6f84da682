"""Jamba: Mamba or full attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import Family
from shardwise.models.tensor_splits import mamba
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.feed_forward import feed_forward

JAMBA = Family(
    "jamba",
    norm="model.final_layernorm",
    mixers={"linear_attention": "mamba", "full_attention": "full_attention"},
    token_mixers={"mamba": ("mamba",), "full_attention": ("self_attn",)},
    feed_forward=("feed_forward",),
    splits={"mamba": mamba.jamba, "self_attn": attention, "feed_forward": feed_forward},
    router="JambaTopKRouter",
    experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    gating=("mamba.dt_proj", "feed_forward.router"),
    # The mixer multiplies by the weight itself, to add the bias only inside the scan.
    bypassed=("mamba.dt_proj",),
)
