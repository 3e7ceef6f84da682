"""Kimi Linear: Kimi Delta Attention or latent attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import Family, mixer
from shardwise.models.kinds import attention, feed_forward, kda, mixture

KIMI_LINEAR = Family(
    "kimi_linear",
    mixers={
        "linear_attention": mixer("self_attn", kda.KDA),
        "full_attention": mixer("self_attn", attention.LATENT),
    },
    # No router: its load is balanced by a bias on the scores (e_score_correction_bias), not by a
    # loss.
    feed_forward={"dense": {"mlp": feed_forward.MLP}, "moe": {"mlp": mixture.WITH_SHARED_EXPERTS}},
)
