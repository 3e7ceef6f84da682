"""Qwen1.5-MoE and Qwen2-MoE: attention, then a mixture of experts with a shared one, or an MLP."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.kinds import mixture

QWEN2_MOE = Family(
    "qwen2_moe", feed_forward=feed_forwards(mixture.WITH_GATED_EXPERT), router="Qwen2MoeTopKRouter"
)
