"""DeepSeek-V3: latent attention, then an MLP or a mixture of experts with a shared one."""

from shardwise.models.families.base import Family, feed_forwards, mixer
from shardwise.models.kinds import latent_attention, mixture

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    mixers={"full_attention": mixer("self_attn", latent_attention.LATENT)},
    # No router: a bias balances its load (`mixture.MIXTURE`).
    feed_forward=feed_forwards(mixture.MIXTURE),
)
