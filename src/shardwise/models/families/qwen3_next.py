"""Qwen3-Next: Gated DeltaNet or full attention, then a mixture of experts with a shared one."""

from shardwise.models.families.base import FULL, Family, feed_forwards, mixer
from shardwise.models.kinds import gated_delta_net, mixture

QWEN3_NEXT = Family(
    "qwen3_next",
    mixers={
        "linear_attention": mixer("linear_attn", gated_delta_net.BY_KEY_HEAD),
        "full_attention": FULL,
    },
    feed_forward=feed_forwards(mixture.WITH_GATED_EXPERT),
    router="Qwen3NextTopKRouter",
)
