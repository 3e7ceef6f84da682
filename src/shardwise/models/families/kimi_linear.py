"""Kimi Linear: Kimi Delta Attention and latent full attention, then an MLP or experts with a shared one."""

from shardwise.models.families.base import SPLITS, Family
from shardwise.models.tensor_splits import kda

KIMI_LINEAR = Family(
    "kimi_linear",
    mixers={"linear_attention": "kda", "full_attention": "full_attention"},
    token_mixers={"kda": ("self_attn",), "full_attention": ("self_attn",)},
    splits=SPLITS | {"self_attn": kda.kimi_linear},
    # No router: its load is balanced by a bias on the scores (e_score_correction_bias), not by a loss.
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    gating=("self_attn.forget_gate.f_a_proj", "self_attn.forget_gate.f_b_proj", "self_attn.b_proj", "mlp.gate"),
)
