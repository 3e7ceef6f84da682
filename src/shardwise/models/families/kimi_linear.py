"""Kimi Linear: Kimi Delta Attention or latent attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import Family, feed_forwards, mixer
from shardwise.models.kinds import kda, latent_attention, mixture

KIMI_LINEAR = Family(
    "kimi_linear",
    mixers={
        "linear_attention": mixer("self_attn", kda.KDA),
        "full_attention": mixer("self_attn", latent_attention.LATENT),
    },
    # No router: a bias balances its load (`mixture.MIXTURE`).
    feed_forward=feed_forwards(mixture.MIXTURE),
)
