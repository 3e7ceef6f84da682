"""Granite 4.0 hybrids: Mamba2 or full attention, then a mixture of experts beside an MLP that every token takes."""

from shardwise.models.families.base import Cut, Family
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.feed_forward import gate_up_mlp, mixture
from shardwise.models.tensor_splits.mamba2 import mamba2

GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    mixers={"linear_attention": "mamba2", "full_attention": "full_attention"},
    token_mixers={"mamba2": ("mamba",), "full_attention": ("self_attn",)},
    feed_forward=("block_sparse_moe", "shared_mlp"),
    splits={"self_attn": attention, "mamba": mamba2, "block_sparse_moe": mixture, "shared_mlp": gate_up_mlp},
    cut=Cut(factor="embedding_multiplier"),
    router="GraniteMoeHybridTopKRouter",
    logits_divided_by="logits_scaling",
    experts=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    gating=("block_sparse_moe.router",),
    # mamba_ssm's training kernel ends with the output projection and takes its weight as an argument.
    bypassed=("mamba.out_proj",),
)
