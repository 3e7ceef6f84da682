"""OLMo hybrids: Gated DeltaNet or full attention, then an MLP."""

from shardwise.models.families.base import FULL, Family, mixer
from shardwise.models.kinds import gated_delta_net
from shardwise.models.spec import Norms

OLMO_HYBRID = Family(
    "olmo_hybrid",
    mixers={
        "linear_attention": mixer("linear_attn", gated_delta_net.SEPARATE),
        "full_attention": FULL,
    },
    norms=Norms(rounds_last=True),
)
