"""Granite 3 mixtures: full attention, then a mixture of experts."""

from shardwise.models.families.base import Family, StageFacts, feed_forwards
from shardwise.models.kinds import mixture

GRANITEMOE = Family(
    "granitemoe",
    feed_forward=feed_forwards(mixture.ROUTER, "block_sparse_moe"),
    cut=StageFacts(factor="embedding_multiplier"),
    router="GraniteMoeTopKRouter",
    logits_divided_by="logits_scaling",
)
