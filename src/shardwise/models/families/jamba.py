"""Jamba: Mamba or full attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import FULL, Family, mixer
from shardwise.models.kinds import feed_forward, mamba, mixture
from shardwise.models.spec import Norms

JAMBA = Family(
    "jamba",
    norm="model.final_layernorm",
    mixers={"linear_attention": mixer("mamba", mamba.MAMBA), "full_attention": FULL},
    feed_forward={
        "dense": {"feed_forward": feed_forward.MLP},
        "moe": {"feed_forward": mixture.ROUTER},
    },
    norms=Norms(between="pre_ff_layernorm"),
    router="JambaTopKRouter",
)
