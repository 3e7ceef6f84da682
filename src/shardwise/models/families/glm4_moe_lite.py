"""GLM-4.7-Flash: latent attention, then an MLP or a mixture of experts with a shared one."""

from shardwise.models.families.base import Family, feed_forwards, mixer
from shardwise.models.kinds import latent_attention, mixture

GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    mixers={"full_attention": mixer("self_attn", latent_attention.LATENT)},
    # No router: a bias balances its load (`mixture.MIXTURE`).
    feed_forward=feed_forwards(mixture.MIXTURE),
)
