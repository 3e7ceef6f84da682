"""OLMo hybrids: Gated DeltaNet or full attention, then an MLP."""

from shardwise.models.families.base import Family, mixer
from shardwise.models.kinds import attention, gated_delta_net

OLMO_HYBRID = Family(
    "olmo_hybrid",
    mixers={
        "linear_attention": mixer("linear_attn", gated_delta_net.SEPARATE),
        "full_attention": mixer("self_attn", attention.ROTATED_WIDE),
    },
)
