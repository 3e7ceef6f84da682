"""Granite 4.0 hybrids: Mamba2 or full attention, then a mixture of experts beside an MLP."""

from shardwise.models.families.base import FULL, Family, StageFacts, mixer
from shardwise.models.kinds import feed_forward, mamba2, mixture

GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    mixers={"linear_attention": mixer("mamba", mamba2.MAMBA2), "full_attention": FULL},
    feed_forward={
        "dense": {"shared_mlp": feed_forward.JOINED},
        "moe": {"block_sparse_moe": mixture.ROUTER, "shared_mlp": feed_forward.JOINED},
    },
    cut=StageFacts(factor="embedding_multiplier"),
    router="GraniteMoeHybridTopKRouter",
    logits_divided_by="logits_scaling",
)
