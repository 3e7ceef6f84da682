"""Qwen3-MoE: attention, then a mixture of experts, or an MLP in the layers that the config names."""

from shardwise.models.families.base import HYBRID_MIXERS, Family

QWEN3_MOE = Family(
    "qwen3_moe",
    token_mixers=HYBRID_MIXERS,
    router="Qwen3MoeTopKRouter",
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    gating=("mlp.gate",),
    renamed_by_peft=("gate_proj", "up_proj", "down_proj"),
)
