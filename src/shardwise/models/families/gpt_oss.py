"""gpt-oss: attention with sinks over a window or all tokens, then a mixture of experts."""

from shardwise.models.families.base import Family, feed_forwards, mixer
from shardwise.models.kinds import attention, mixture

GPT_OSS = Family(
    "gpt_oss",
    mixers={
        "full_attention": mixer("self_attn", attention.ANGLES_ONCE),
        "sliding_attention": mixer("self_attn", attention.SLIDING_ANGLES_ONCE),
    },
    feed_forward=feed_forwards(mixture.ROUTER),
    router="GptOssTopKRouter",
)
