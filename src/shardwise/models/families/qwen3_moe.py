"""Qwen3-MoE: attention, then a mixture of experts, or an MLP where the config says so."""

from shardwise.models.families.base import Family
from shardwise.models.kinds import feed_forward, mixture

QWEN3_MOE = Family(
    "qwen3_moe",
    feed_forward={"dense": {"mlp": feed_forward.MLP}, "moe": {"mlp": mixture.MIXTURE}},
    router="Qwen3MoeTopKRouter",
    renamed_by_peft=("gate_proj", "up_proj", "down_proj"),
)
