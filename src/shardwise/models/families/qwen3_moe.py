"""Qwen3-MoE: attention, then a mixture of experts, or an MLP where the config says so."""

from shardwise.models.families.base import Family, feed_forwards
from shardwise.models.kinds import mixture

QWEN3_MOE = Family(
    "qwen3_moe",
    feed_forward=feed_forwards(mixture.MIXTURE),
    router="Qwen3MoeTopKRouter",
    text_parts={"qwen3_vl_moe_text": {"norm_topk_prob": True}},
)
