"""Families of the common shape: softmax attention, then an MLP."""

from shardwise.models.families.base import Family, StageFacts, mixer
from shardwise.models.kinds import attention

LLAMA = Family("llama")
MISTRAL = Family("mistral", options={"sliding_window": None})  # as published since 0.2
QWEN2 = Family("qwen2")
QWEN3 = Family("qwen3")
SMOLLM3 = Family("smollm3")
ARCEE = Family("arcee")
SEED_OSS = Family("seed_oss")
OLMO2 = Family("olmo2", mixers={"full_attention": mixer("self_attn", attention.ROTATED_WIDE)})
OLMO3 = Family(
    "olmo3",
    mixers={
        "full_attention": mixer("self_attn", attention.ROTATED_WIDE),
        "sliding_attention": mixer("self_attn", attention.SLIDING_ROTATED_WIDE),
    },
)
EXAONE4 = Family(
    "exaone4",
    mixers={
        "full_attention": mixer("self_attn", attention.BESIDE_WINDOWS),
        "sliding_attention": mixer("self_attn", attention.SLIDING),
    },
)
GRANITE = Family(
    "granite", cut=StageFacts(factor="embedding_multiplier"), logits_divided_by="logits_scaling"
)
