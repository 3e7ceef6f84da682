"""LFM2: short gated convolutions and full attention, an MLP or a mixture of experts after each."""

from dataclasses import replace

from shardwise.models.families.base import FULL, Family, feed_forwards, mixer
from shardwise.models.kinds import feed_forward, mixture, short_convolution
from shardwise.models.spec import Norms

LFM2 = Family(
    "lfm2",
    norm="model.embedding_norm",
    mixers={"conv": mixer("conv", short_convolution.SHORT_CONVOLUTION), "full_attention": FULL},
    feed_forward={"dense": {"feed_forward": feed_forward.MLP}},
    norms=Norms(before="operator_norm", between="ffn_norm"),
)
# No router: a bias balances its load (`mixture.MIXTURE`).
LFM2_MOE = replace(
    LFM2, model_type="lfm2_moe", feed_forward=feed_forwards(mixture.MIXTURE, "feed_forward")
)
