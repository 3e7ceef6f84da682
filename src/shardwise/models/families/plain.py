"""Families of the common shape: softmax attention, then an MLP."""

from shardwise.models.families.base import Family, mixer
from shardwise.models.kinds import attention
from shardwise.models.spec import Norms

LLAMA = Family("llama")
QWEN3 = Family("qwen3")
OLMO2 = Family(
    "olmo2",
    mixers={"full_attention": mixer("self_attn", attention.ROTATED_WIDE)},
    norms=Norms(rounds_last=True),
)
