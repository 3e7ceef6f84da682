"""Jamba: Mamba or full attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import FULL, Family, feed_forwards, mixer
from shardwise.models.kinds import mamba, mixture
from shardwise.models.spec import Norms

JAMBA = Family(
    "jamba",
    norm="model.final_layernorm",
    mixers={"linear_attention": mixer("mamba", mamba.MAMBA), "full_attention": FULL},
    feed_forward=feed_forwards(mixture.ROUTER, "feed_forward"),
    norms=Norms(between="pre_ff_layernorm"),
    router="JambaTopKRouter",
)
