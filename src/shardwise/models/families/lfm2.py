"""LFM2: short gated convolutions and full attention, an MLP after each."""

from shardwise.models.families.base import FULL, Family, mixer
from shardwise.models.kinds import feed_forward, short_convolution
from shardwise.models.spec import Norms

LFM2 = Family(
    "lfm2",
    norm="model.embedding_norm",
    mixers={"conv": mixer("conv", short_convolution.SHORT_CONVOLUTION), "full_attention": FULL},
    feed_forward={"dense": {"feed_forward": feed_forward.MLP}},
    norms=Norms(before="operator_norm", between="ffn_norm"),
)
