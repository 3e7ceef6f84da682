"""Qwen3-Next: Gated DeltaNet and full attention, a mixture of experts with a shared one after each mixer."""

from shardwise.models.families.base import HYBRID, HYBRID_MIXERS, SPLITS, Family
from shardwise.models.tensor_splits import delta_net

QWEN3_NEXT = Family(
    "qwen3_next",
    mixers=HYBRID,
    token_mixers=HYBRID_MIXERS,
    splits=SPLITS | {"linear_attn": delta_net.qwen3_next},
    router="Qwen3NextTopKRouter",
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    gates=("mlp.shared_expert_gate",),
    gating=("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"),
    renamed_by_peft=("gate_proj", "up_proj", "down_proj"),
)
