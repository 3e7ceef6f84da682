"""Nemotron-H: one block in each layer: Mamba2, full attention, an MLP or a mixture of experts."""

from shardwise.models.families.base import Family, StageFacts, mixer
from shardwise.models.kinds import attention, feed_forward, mamba2, mixture
from shardwise.models.spec import Norms

NEMOTRON_H = Family(
    "nemotron_h",
    embed="model.embeddings",
    norm="model.norm_f",
    mixers={
        "linear_attention": mixer("mixer", mamba2.MAMBA2),
        "full_attention": mixer("mixer", attention.FULL),
        "mlp": mixer("mixer", feed_forward.MLP),
        "moe": mixer("mixer", mixture.WITHOUT_GATES),
    },
    feed_forward={},  # a block of its own
    norms=Norms(before="norm"),
    # No router: a bias balances its load (`mixture.MIXTURE`).
    cut=StageFacts(layer_attribute="block_type"),
)
