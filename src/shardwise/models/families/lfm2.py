"""LFM2: short gated convolutions and full attention, an MLP after each."""

from shardwise.models.families.base import Family
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.convolution import short_convolution
from shardwise.models.tensor_splits.feed_forward import feed_forward

LFM2 = Family(
    "lfm2",
    norm="model.embedding_norm",
    mixers={"conv": "short_convolution", "full_attention": "full_attention"},
    token_mixers={"short_convolution": ("conv",), "full_attention": ("self_attn",)},
    feed_forward=("feed_forward",),
    splits={"conv": short_convolution, "self_attn": attention, "feed_forward": feed_forward},
)
