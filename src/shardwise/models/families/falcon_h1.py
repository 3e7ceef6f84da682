"""Falcon-H1: Mamba2, then full attention, on the same input, then an MLP."""

from shardwise.models.families.base import Family, Mixer, StageFacts
from shardwise.models.kinds import attention, feed_forward, mamba2
from shardwise.models.spec import Block, Norms

FALCON_H1 = Family(
    "falcon_h1",
    norm="model.final_layernorm",
    logits_multiplied_by="lm_head_multiplier",
    mixers={
        "hybrid": Mixer(
            "attention_and_mamba2",
            (Block("mamba", mamba2.MAMBA2), Block("self_attn", attention.FULL)),
        )
    },
    feed_forward={"dense": {"feed_forward": feed_forward.MLP}},
    norms=Norms(between="pre_ff_layernorm"),
    cut=StageFacts(layer_outputs=1),
)
