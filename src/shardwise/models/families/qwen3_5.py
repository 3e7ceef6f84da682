"""Qwen3.5: Gated DeltaNet or full attention, then an MLP or a mixture of experts."""

from shardwise.models.families.base import FULL, Family, feed_forwards, mixer
from shardwise.models.kinds import gated_delta_net, mixture

_MIXERS = {"linear_attention": mixer("linear_attn", gated_delta_net.JOINED), "full_attention": FULL}
QWEN3_5 = Family("qwen3_5_text", mixers=_MIXERS)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    mixers=_MIXERS,
    feed_forward=feed_forwards(mixture.WITH_GATED_EXPERT),
    router="Qwen3_5MoeTopKRouter",
)
