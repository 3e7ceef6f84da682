"""One tiny random model of each proven family, with every layer kind of the family."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.recurrence import Tokens
from shardwise.models.families import spec_of
from shardwise.models.load import hold_frozen
from shardwise.models.patches.cores import use_cores
from shardwise.models.spec import ModelSpec

_COMMON = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HYBRID = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 24}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 32,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DENSE_THEN_MIXTURE = {
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4},
    **{"n_group": 2, "topk_group": 1, **_MIXTURE},
}
CONFIGS = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": None},
    "ministral3": {"num_hidden_layers": 2, "head_dim": 8},
    "smollm3": {"num_hidden_layers": 2, "head_dim": 8, "no_rope_layers": [1, 0]},
    "granite": {"num_hidden_layers": 2},
    "arcee": {"num_hidden_layers": 2, "head_dim": 8},
    "seed_oss": {
        **{"num_hidden_layers": 2, "head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0}
    },
    "ernie4_5": {"num_hidden_layers": 2, "head_dim": 8},
    "ernie4_5_moe": {
        **{"num_hidden_layers": 2, "head_dim": 8, "moe_num_experts": 4, "moe_k": 2},
        **{"moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    },
    "hunyuan_v1_dense": {"num_hidden_layers": 2, "head_dim": 8},
    "starcoder2": {
        **{"num_hidden_layers": 2, "head_dim": 8, "sliding_window": None},
        **{"residual_dropout": 0.0, "embedding_dropout": 0.0},
    },
    "glm4": {"num_hidden_layers": 2, "head_dim": 8},
    "gemma2": {"num_hidden_layers": 2, "head_dim": 8, **_SLIDING},
    "granite_swa": {"num_hidden_layers": 2, **_SLIDING},
    "gemma3_text": {"num_hidden_layers": 2, "head_dim": 8, **_SLIDING},
    "cohere2": {"num_hidden_layers": 2, **_SLIDING},
    "apertus": {"num_hidden_layers": 2, "head_dim": 8},
    "phi3": {"num_hidden_layers": 2},
    "afmoe": {
        **{"num_hidden_layers": 2, "head_dim": 8, "num_dense_layers": 1, **_SLIDING, **_MIXTURE},
        **{"num_experts": 4, "num_shared_experts": 1, "mup_enabled": True},
    },
    "dots1": {
        **{"num_hidden_layers": 2, "head_dim": 8, "first_k_dense_replace": 1, **_SLIDING},
        **{"n_routed_experts": 4, "n_shared_experts": 1, **_MIXTURE},
    },
    "qwen2_moe": {
        **{"num_hidden_layers": 2, "use_sliding_window": True, **_SLIDING, **_MIXTURE},
        **{"num_experts": 4, "mlp_only_layers": [1], "shared_expert_intermediate_size": 24},
    },
    "glm4_moe_lite": {
        **{"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], **_MIXTURE},
        **{"n_routed_experts": 4, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
    "qwen2": {"num_hidden_layers": 2, "use_sliding_window": True, **_SLIDING},
    "olmo3": {"num_hidden_layers": 2, "head_dim": 8, **_SLIDING},
    "exaone4": {"num_hidden_layers": 2, "head_dim": 8, **_SLIDING},
    "olmo2": {"num_hidden_layers": 2, "head_dim": 8},
    "qwen3": {"num_hidden_layers": 2, "head_dim": 8, "use_sliding_window": True, **_SLIDING},
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "gpt2": {
        "num_hidden_layers": 2,
        "n_inner": 48,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen3_5_text": {**_HYBRID, "head_dim": 8},
    "qwen3_next": {
        **_HYBRID,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": {**_HYBRID, "linear_num_key_heads": 4},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        **_MAMBA2,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "head_dim": 8,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        **_MAMBA2,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
    },
    "qwen3_5_moe_text": {
        **{**_HYBRID, **_MIXTURE, "head_dim": 8, "num_experts": 4},
        "shared_expert_intermediate_size": 24,
    },
    "lfm2_moe": {
        **{**_MIXTURE, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        **{"num_dense_layers": 1, "num_experts": 4},
    },
    "granitemoe": {"num_hidden_layers": 2, "num_local_experts": 4},
    "mixtral": {"num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 4},
    "gpt_oss": {"num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 4, **_SLIDING},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], **_MAMBA2},
    "glm4_moe": {**_DENSE_THEN_MIXTURE, "head_dim": 8, "use_qk_norm": True},
    "deepseek_v3": {
        **{**_DENSE_THEN_MIXTURE, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
    "jet_nemotron": {
        "num_hidden_layers": 3,
        "layer_types": ["jet", "swa", "attn"],
        "tie_word_embeddings": False,
        "efficient_attention_config": {
            "jet": {"num_heads": 4, "head_dim": 8},
            "swa": {"window_size": 24},
        },
    },
}


def build(family: str, device: str = "cpu", **changes: object) -> tuple[PreTrainedModel, ModelSpec]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_COMMON, **CONFIGS[family], **changes})
    config._experts_implementation = "eager"  # torch's FLOP counter counts a grouped product as 0
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    hold_frozen(model)
    spec = spec_of(config, model)
    use_cores(model, spec, Tokens)
    return model.train(), spec


def add_lora(
    model: PreTrainedModel,
    targets: Iterable[str],
    parameters: Iterable[str] = (),
    **options: object,
) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(
        r=4,
        fan_in_fan_out=transposed,
        target_modules=list(targets),
        target_parameters=list(parameters) or None,
        **options,
    )
    with warnings.catch_warnings():
        # With qwen3_next PEFT takes dense linears for experts, and says so.
        warnings.simplefilter("ignore", RuntimeWarning)
        inject_adapter_in_model(config, model, low_cpu_mem_usage=model.device.type == "meta")


def linears(model: nn.Module, *within: str) -> list[str]:
    """Linears whose name holds one of `within`; all but the head without.

    Some take no adapter: PEFT refuses Mamba2's `out_proj`, and takes Trinity's router for a
    parameter; Jamba never calls its `dt_proj`.
    """
    refused = ("lm_head", "mixer.out_proj", "mamba.out_proj", "dt_proj", "router.gate")
    names = [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    ]
    return [
        n
        for n in names
        if not any(r in n for r in refused) and (not within or any(w in n for w in within))
    ]
