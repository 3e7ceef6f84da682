"""Families of the common shape: softmax attention, then an MLP."""

from dataclasses import replace

from shardwise.models.families.base import Family, StageFacts, mixer
from shardwise.models.kinds import attention, feed_forward
from shardwise.models.spec import Norms

LLAMA = Family("llama")
ERNIE4_5 = Family(
    "ernie4_5", mixers={"full_attention": mixer("self_attn", attention.ROTATED_WIDE_PAIRS)}
)
HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    options={"head_dim": 128},  # none by default
    text_parts={"hunyuan_vl_text": {}},
)
STARCODER2 = Family("starcoder2", options={"residual_dropout": 0.0, "embedding_dropout": 0.0})
GLM4 = Family(
    "glm4",
    mixers={"full_attention": mixer("self_attn", attention.ROTATED_PAIRS)},
    feed_forward={"dense": {"mlp": feed_forward.JOINED}},
    norms=Norms(behind="post_self_attn_layernorm", after="post_mlp_layernorm"),
)
GEMMA3_TEXT = Family(
    "gemma3_text",
    norms=Norms(behind="post_attention_layernorm", between="pre_feedforward_layernorm"),
    logits_capped_by="final_logit_softcapping",
)
GEMMA2 = Family(
    "gemma2",
    mixers={
        "full_attention": mixer("self_attn", attention.CAPPED),
        "sliding_attention": mixer("self_attn", attention.SLIDING_CAPPED),
    },
    norms=GEMMA3_TEXT.norms,
    logits_capped_by="final_logit_softcapping",
)
PHI3 = Family(
    "phi3",
    mixers={
        "full_attention": mixer("self_attn", attention.GROUPED),
        "sliding_attention": mixer("self_attn", attention.SLIDING_GROUPED),
    },
    feed_forward={"dense": {"mlp": feed_forward.JOINED}},
    seeded=("resid_pdrop", "embd_pdrop"),
)
MISTRAL = Family("mistral", options={"sliding_window": None})  # as published since 0.2
MINISTRAL3 = Family("ministral3")
QWEN2 = Family("qwen2", text_parts={"qwen2_vl_text": {}, "qwen2_5_vl_text": {}})
QWEN3 = Family("qwen3", text_parts={"qwen3_vl_text": {}})
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
COHERE2 = Family(
    "cohere2",
    mixers={
        "full_attention": mixer("self_attn", attention.PAIRS_BESIDE_WINDOWS),
        "sliding_attention": mixer("self_attn", attention.SLIDING_PAIRS),
    },
    logits_multiplied_by="logit_scale",
)
APERTUS = Family(
    "apertus", norms=Norms(before="attention_layernorm", between="feedforward_layernorm")
)
GRANITE = Family(
    "granite", cut=StageFacts(factor="embedding_multiplier"), logits_divided_by="logits_scaling"
)
GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    mixers={
        "full_attention": mixer("self_attn", attention.SINKS),
        "sliding_attention": mixer("self_attn", attention.SLIDING_SINKS),
    },
)
