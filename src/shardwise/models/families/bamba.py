"""Bamba: Mamba2 or full attention, then an MLP."""

from shardwise.models.families.base import FULL, Family, StageFacts, mixer
from shardwise.models.kinds import feed_forward, mamba2
from shardwise.models.spec import Norms

BAMBA = Family(
    "bamba",
    norm="model.final_layernorm",
    mixers={"linear_attention": mixer("mamba", mamba2.MAMBA2), "full_attention": FULL},
    feed_forward={"dense": {"feed_forward": feed_forward.MLP}},
    norms=Norms(between="pre_ff_layernorm"),
    cut=StageFacts(layer_outputs=2),
    options={"attn_layer_indices": [9, 18, 27]},
)
