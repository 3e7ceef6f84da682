"""Tiny models of types that no family lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_CAPPED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "attn_logit_softcapping": 0.05,
    "final_logit_softcapping": 3.0,
}
UNPROVEN: dict[str, dict[str, Any]] = {
    "ministral": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
        "sliding_window": 16,
    },
    "hyperclovax": {"logits_scaling": 0.5, "embedding_multiplier": 2.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax": {  # linear attention of its own, and experts
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "head_dim": 8,
        "block_size": 8,
    },
    # No form of attention for torch's scaled dot product: softcapped scores.
    "vaultgemma": _CAPPED,
}


def write_config(model_type: str, folder: Path) -> Path:
    """Write the config.json of a tiny model; the folder."""
    AutoConfig.for_model(model_type, **{**_COMMON, **UNPROVEN[model_type]}).save_pretrained(folder)
    return folder
