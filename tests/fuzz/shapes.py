"""A model of odd sizes of each family, as a config.json says it; drawn around the tiny model of
configs/models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.parity.harness import CONFIGS, FAMILIES

ALIGNED = 8
"""Experts of widths that are multiples of it on each rank run in one grouped product, others one by
one."""


@dataclass(frozen=True)
class Sizes:
    """Draws sizes, most of which `tp` ranks can share; some not, which must be refused."""

    random: Random
    tp: int
    num_layers: int

    def among(self, *values: Any) -> Any:
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def shared(self, low: int, high: int, of: int = 1) -> int:
        """A multiple of `of`, and mostly of `tp` too."""
        unit = of if self.chance(0.04) else of * self.tp
        return unit * self.random.randint(max(1, low // unit), max(1, high // unit))

    def heads(self) -> int:
        return self.shared(1, 6)

    def query_and_key_heads(self) -> tuple[int, int]:
        """Numbers of query heads and of the key/value heads that they share."""
        kv_heads = (
            self.among(1, 2, 3, 5)
            if self.tp == 1 or self.chance(0.04)
            else self.among(1, self.tp, 2 * self.tp)
        )
        heads = kv_heads * self.random.randint(1, 4)
        return (
            (heads, kv_heads)
            if heads % self.tp == 0 or self.chance(0.05)
            else (heads * self.tp, kv_heads)
        )

    def even(self, low: int, high: int) -> int:
        return 2 * self.random.randint(low // 2, high // 2)

    def pattern(self, *kinds: str, all_of: bool = False) -> list[str]:
        """A kind for every layer; `all_of`: each at least once, in as many layers as that takes."""
        least = list(kinds) if all_of else []
        drawn = least + [self.among(*kinds) for _ in range(self.num_layers - len(least))]
        self.random.shuffle(drawn)
        return drawn

    def width(self) -> int:
        """Of a model with experts."""
        return self.among(self.even(20, 84), ALIGNED * self.random.randint(3, 9))

    def experts(self) -> dict[str, int]:
        num_experts = self.random.randint(2, 7)
        return {
            "num_experts": num_experts,
            "num_experts_per_tok": self.random.randint(1, min(3, num_experts)),
        }

    def groups(self, experts: dict[str, int]) -> int:
        """Into how many groups the experts fall; those of a token may come from all of them."""
        return 2 if experts["num_experts"] in (4, 6) and self.chance(0.4) else 1

    def expert_width(self) -> int:
        return self.shared(8, 48, self.among(1, ALIGNED))


def draw_model(family: str, sizes: Sizes) -> dict[str, Any]:
    """A config.json."""
    tiny = json.loads((CONFIGS / FAMILIES[family] / "config.json").read_text())
    common = {
        "vocab_size": sizes.random.randint(7, 419),
        "hidden_size": sizes.even(20, 84),
        "num_hidden_layers": sizes.num_layers,
        "intermediate_size": sizes.shared(24, 160),
        "tie_word_embeddings": sizes.chance(0.3),
    }
    flags = {name: sizes.chance(0.25) for name in _FLAGS.get(family, ())}
    return tiny | common | flags | _OWN[family](sizes)


def _attention(sizes: Sizes) -> dict[str, Any]:
    heads, kv_heads = sizes.query_and_key_heads()
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": sizes.even(4, 20),
    }


def _attention_within(sizes: Sizes, of: int = 2) -> dict[str, Any]:
    """Attention whose heads have the width of the model together: their size follows, a multiple of
    `of`."""
    heads, kv_heads = sizes.query_and_key_heads()
    size = of * sizes.random.randint(1, max(1, 64 // heads // of))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
    }


def _llama(sizes: Sizes) -> dict[str, Any]:
    attention = _attention(sizes)
    return attention | {
        "hidden_size": attention["num_attention_heads"] * sizes.random.randint(3, 12)
    }


def _ministral3(sizes: Sizes) -> dict[str, Any]:
    begins = sizes.random.randint(2, 9)  # Queries are scaled from there on.
    return _llama(sizes) | {
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": begins, "factor": 4096 / begins}
    }


def _qwen3(sizes: Sizes) -> dict[str, Any]:
    return _attention(sizes) | {
        "layer_types": sizes.pattern("full_attention", "sliding_attention"),
        "sliding_window": sizes.random.randint(2, 19),
    }


def _smollm3(sizes: Sizes) -> dict[str, Any]:
    rotated = [int(sizes.chance(0.7)) for _ in range(sizes.num_layers)]
    return _llama(sizes) | {"no_rope_layers": rotated}


def _qwen3_moe(sizes: Sizes) -> dict[str, Any]:
    return _attention(sizes) | _mixture(sizes)


def _mixture(sizes: Sizes) -> dict[str, Any]:
    dense = [layer for layer in range(sizes.num_layers) if sizes.chance(0.3)]
    return sizes.experts() | {
        "hidden_size": sizes.width(),
        "mlp_only_layers": dense,
        "moe_intermediate_size": sizes.expert_width(),
    }


def _delta_net(sizes: Sizes) -> dict[str, Any]:
    key_heads = sizes.heads()
    return _attention(sizes) | {
        "layer_types": sizes.pattern("linear_attention", "full_attention"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * sizes.among(1, 1, 2, 3),
        "linear_key_head_dim": sizes.random.randint(3, 18),
        "linear_value_head_dim": sizes.random.randint(3, 18),
        "linear_conv_kernel_dim": sizes.random.randint(2, 5),
        "head_dim": 4 * sizes.random.randint(2, 5),  # a quarter of it is rotated
    }


def _qwen3_next(sizes: Sizes) -> dict[str, Any]:
    return (
        _delta_net(sizes)
        | _mixture(sizes)
        | {"shared_expert_intermediate_size": sizes.shared(6, 60)}
    )


def _olmo_hybrid(sizes: Sizes) -> dict[str, Any]:
    key_heads = sizes.heads()
    return _attention_within(sizes) | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * sizes.among(1, 1, 2),
        "layer_types": sizes.pattern("linear_attention", "full_attention", all_of=True),
        "num_hidden_layers": max(2, sizes.num_layers),
        "linear_key_head_dim": sizes.random.randint(3, 18),
        "linear_value_head_dim": sizes.random.randint(3, 18),
        "linear_conv_kernel_dim": sizes.random.randint(2, 5),
    }


def _nemotron_h(sizes: Sizes) -> dict[str, Any]:
    groups = sizes.among(1, sizes.tp, 2 * sizes.tp)
    experts = sizes.experts()
    expert_groups = sizes.groups(experts)
    return _attention(sizes) | {
        "n_group": expert_groups,
        "topk_group": expert_groups,
        "hidden_size": sizes.width(),
        "layers_block_type": sizes.pattern("linear_attention", "moe", "full_attention", "mlp"),
        "mamba_num_heads": sizes.shared(1, 3, groups),
        "mamba_head_dim": sizes.random.randint(3, 12),
        "ssm_state_size": sizes.random.randint(3, 17),
        "n_groups": groups,
        "conv_kernel": sizes.random.randint(2, 4),
        "chunk_size": sizes.among(3, 8, 32),
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": sizes.expert_width(),
        "moe_shared_expert_intermediate_size": sizes.shared(6, 60),
    }


def _lfm2(sizes: Sizes) -> dict[str, Any]:
    return _attention_within(sizes) | {
        "layer_types": sizes.pattern("conv", "full_attention"),
        "conv_L_cache": sizes.random.randint(2, 5),
    }


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    heads = sizes.heads()
    width = heads * sizes.random.randint(3, 16)
    return {
        "n_layer": sizes.num_layers,
        "n_head": heads,
        "n_embd": width,
        "hidden_size": width,
        "n_inner": sizes.shared(24, 160),
        "n_positions": sizes.among(16, 141, 200),
    }


def _granitemoehybrid(sizes: Sizes) -> dict[str, Any]:
    heads, kv_heads = sizes.query_and_key_heads()
    mamba_heads = sizes.shared(1, 4)
    head_dim = sizes.even(2, 10)  # of attention
    hidden = heads * head_dim
    aligned = sizes.among(1, ALIGNED)
    while hidden % aligned or (2 * hidden) % mamba_heads:
        hidden += heads * 2
    experts = sizes.experts()
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": sizes.pattern("linear_attention", "full_attention"),
        "intermediate_size": sizes.expert_width(),
        "shared_intermediate_size": sizes.shared(6, 60),
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "position_embedding_type": sizes.among("rope", "nope"),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 2 * hidden // mamba_heads,
        "mamba_n_groups": sizes.among(*(g for g in (1, 2, sizes.tp) if mamba_heads % g == 0)),
        "mamba_d_state": sizes.random.randint(3, 17),
        "mamba_d_conv": sizes.random.randint(2, 4),
        "mamba_chunk_size": sizes.among(3, 8, 32),
    }


def _falcon_h1(sizes: Sizes) -> dict[str, Any]:
    groups = sizes.among(1, 2, sizes.tp)
    heads, size = sizes.shared(1, 4, groups), sizes.random.randint(3, 12)
    return _attention(sizes) | {
        "mamba_d_ssm": heads * size,
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": groups,
        "mamba_d_state": sizes.random.randint(3, 17),
        "mamba_d_conv": sizes.random.randint(2, 4),
        "mamba_chunk_size": sizes.among(3, 8, 32),
    }


def _kimi_linear(sizes: Sizes) -> dict[str, Any]:
    heads = sizes.heads()
    experts = sizes.experts()
    expert_groups = sizes.groups(experts)
    return {
        "num_expert_group": expert_groups,
        "topk_group": expert_groups,
        "hidden_size": sizes.width(),
        "layer_types": sizes.pattern("linear_attention", "full_attention"),
        "mlp_layer_types": sizes.pattern("dense", "sparse"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": sizes.random.randint(5, 24),
        "qk_nope_head_dim": sizes.random.randint(3, 16),
        "qk_rope_head_dim": sizes.even(2, 8),
        "v_head_dim": sizes.random.randint(3, 16),
        "linear_num_heads": sizes.heads(),
        "linear_head_dim": sizes.random.randint(3, 16),
        "linear_conv_kernel_dim": sizes.random.randint(2, 4),
        "num_experts": experts["num_experts"],
        "num_experts_per_token": experts["num_experts_per_tok"],
        "moe_intermediate_size": sizes.expert_width(),
    }


def _jamba(sizes: Sizes) -> dict[str, Any]:
    attention = _attention_within(sizes, of=sizes.among(2, ALIGNED))
    period, expert_period = sizes.random.randint(1, 4), sizes.random.randint(1, 3)
    return (
        attention
        | sizes.experts()
        | {
            "attn_layer_period": period,
            "attn_layer_offset": sizes.random.randrange(period),
            "expert_layer_period": expert_period,
            "expert_layer_offset": sizes.random.randrange(expert_period),
            "intermediate_size": sizes.expert_width(),
            "mamba_expand": sizes.among(1, 2),
            "mamba_d_state": sizes.random.randint(3, 12),
            "mamba_d_conv": sizes.random.randint(2, 4),
            "mamba_dt_rank": sizes.random.randint(2, 7),
        }
    )


def _qwen3_5_moe_text(sizes: Sizes) -> dict[str, Any]:
    return (
        _delta_net(sizes)
        | sizes.experts()
        | {
            "hidden_size": sizes.width(),
            "moe_intermediate_size": sizes.expert_width(),
            "shared_expert_intermediate_size": sizes.shared(6, 60),
        }
    )


def _lfm2_moe(sizes: Sizes) -> dict[str, Any]:
    attention = _attention_within(sizes, of=sizes.among(2, ALIGNED))
    return (
        attention
        | sizes.experts()
        | {
            "layer_types": sizes.pattern("conv", "full_attention"),
            "conv_L_cache": sizes.random.randint(2, 5),
            "num_dense_layers": sizes.random.randint(0, sizes.num_layers),
            "moe_intermediate_size": sizes.expert_width(),
        }
    )


def _only_experts(sizes: Sizes) -> dict[str, Any]:
    """A mixture of experts in every layer, whose width is the feed-forward width."""
    experts = sizes.experts()
    return {
        "intermediate_size": sizes.expert_width(),
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
    }


def _granitemoe(sizes: Sizes) -> dict[str, Any]:
    return _attention_within(sizes, of=sizes.among(2, ALIGNED)) | _only_experts(sizes)


def _mixtral(sizes: Sizes) -> dict[str, Any]:
    window = {"sliding_window": sizes.among(None, sizes.random.randint(2, 19))}
    return _attention(sizes) | _only_experts(sizes) | {"hidden_size": sizes.width(), **window}


def _granite_swa(sizes: Sizes) -> dict[str, Any]:
    thetas = [sizes.among(0, 100.0, 10000.0) for _ in range(sizes.num_layers)]
    return _qwen3(sizes) | _llama(sizes) | {"layer_rope_theta": thetas}


def _gpt_oss(sizes: Sizes) -> dict[str, Any]:
    limits = {"swiglu_limit": sizes.among(0.05, 7.0), "swiglu_alpha": sizes.among(1.0, 1.702)}
    return _qwen3(sizes) | _only_experts(sizes) | {"hidden_size": sizes.width(), **limits}


def _bamba(sizes: Sizes) -> dict[str, Any]:
    attention = _attention_within(sizes, of=4)  # half of a head is rotated
    inner = 2 * attention["hidden_size"]
    heads = sizes.among(*(n for n in (1, 2, 4, 8) if inner % n == 0 and n % sizes.tp == 0), inner)
    return attention | {
        "attn_layer_indices": [i for i in range(sizes.num_layers) if sizes.chance(0.4)],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": sizes.among(*(n for n in (1, 2, sizes.tp) if heads % n == 0)),
        "mamba_d_state": sizes.random.randint(3, 17),
        "mamba_d_conv": sizes.random.randint(2, 4),
        "mamba_chunk_size": sizes.among(3, 8, 32),
    }


def _dense_then_experts(sizes: Sizes) -> dict[str, Any]:
    experts = sizes.experts()
    groups = sizes.groups(experts)
    return {
        "hidden_size": sizes.width(),
        "n_group": groups,
        "topk_group": groups,
        "first_k_dense_replace": sizes.random.randint(0, sizes.num_layers),
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": sizes.expert_width(),
    }


def _glm4_moe(sizes: Sizes) -> dict[str, Any]:
    head_dim = 4 * sizes.random.randint(1, 5)  # half of it is rotated
    return _attention(sizes) | _dense_then_experts(sizes) | {"head_dim": head_dim}


def _glm4(sizes: Sizes) -> dict[str, Any]:
    return _attention(sizes) | {"head_dim": 4 * sizes.random.randint(1, 5)}  # half is rotated


def _gemma3(sizes: Sizes) -> dict[str, Any]:
    return _qwen3(sizes) | _attention_within(sizes) | {"head_dim": sizes.even(4, 20)}


def _gemma2(sizes: Sizes) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": sizes.among(None, 0.05, 1.0),
        "final_logit_softcapping": sizes.among(None, 0.5, 30.0),
    }
    return _gemma3(sizes) | caps | {"query_pre_attn_scalar": sizes.random.randint(1, 40)}


def _cohere2(sizes: Sizes) -> dict[str, Any]:
    drawn = _qwen3(sizes) | _attention_within(sizes)
    drawn["logit_scale"] = sizes.among(0.25, 2.0)
    return drawn | {"head_dim": drawn["hidden_size"] // drawn["num_attention_heads"]}


def _dots1(sizes: Sizes) -> dict[str, Any]:
    return _qwen3(sizes) | _dense_then_experts(sizes)


def _ernie4_5_moe(sizes: Sizes) -> dict[str, Any]:
    experts = sizes.experts()
    return _attention(sizes) | {
        "hidden_size": sizes.width(),
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": sizes.expert_width(),
        "moe_num_shared_experts": sizes.random.randint(0, 2),
        "moe_layer_start_index": sizes.random.randint(0, sizes.num_layers),
        "moe_layer_interval": sizes.random.randint(1, 2),
    }


def _afmoe(sizes: Sizes) -> dict[str, Any]:
    return _qwen3(sizes) | {
        **sizes.experts(),
        "hidden_size": sizes.width(),
        "moe_intermediate_size": sizes.expert_width(),
        "num_shared_experts": sizes.random.randint(1, 2),
        "num_dense_layers": sizes.random.randint(0, sizes.num_layers),
    }


def _qwen2_moe(sizes: Sizes) -> dict[str, Any]:
    mixture = _mixture(sizes)
    kinds = sizes.pattern("full_attention", "sliding_attention")
    shared = {"shared_expert_intermediate_size": sizes.shared(6, 60), "layer_types": kinds}
    return mixture | _attention_within(sizes, of=2) | shared


def _glm4_moe_lite(sizes: Sizes) -> dict[str, Any]:
    drawn = _deepseek_v3(sizes)
    num_dense = drawn.pop("first_k_dense_replace")
    num_sparse = sizes.num_layers - num_dense
    return drawn | {"mlp_layer_types": ["dense"] * num_dense + ["sparse"] * num_sparse}


def _deepseek_v3(sizes: Sizes) -> dict[str, Any]:
    heads = sizes.heads()
    return _dense_then_experts(sizes) | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": sizes.among(None, sizes.random.randint(5, 24)),
        "kv_lora_rank": sizes.random.randint(5, 24),
        "qk_nope_head_dim": sizes.random.randint(3, 16),
        "qk_rope_head_dim": sizes.even(2, 8),
        "v_head_dim": sizes.random.randint(3, 16),
    }


def _jet_nemotron(sizes: Sizes) -> dict[str, Any]:
    size, expand = sizes.among((12, 2.6666666667), (6, 1.5), (7, 2), (5, 1))
    heads = sizes.heads()
    jet = {
        "num_heads": heads,
        "head_dim": size,
        "expand_v": expand,
        "conv_size": sizes.random.randint(2, 4),
        "dconv_generator_reduction": sizes.among(*(n for n in (2, 4, 8) if n <= heads * size)),
        "norm_eps": 1e-05,
    }
    return _attention_within(sizes, of=8) | {
        "layer_types": sizes.pattern("jet", "swa", "attn"),
        "efficient_attention_config": {
            "jet": jet,
            "swa": {"window_size": sizes.random.randint(2, 19)},
        },
    }


_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1000000.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_FLAGS = {
    "llama": ("attention_bias", "mlp_bias"),
    "arcee": ("attention_bias", "mlp_bias"),
    **dict.fromkeys(("granite", "granite_swa"), ("attention_bias", "mlp_bias")),
    "smollm3": ("attention_bias", "mlp_bias"),
    "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "ernie4_5": ("use_bias",),
    "ernie4_5_moe": ("use_bias",),
    "hunyuan_v1_dense": ("attention_bias",),
    "starcoder2": ("use_bias",),
    "glm4": ("attention_bias",),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("attention_bias",)),
    "afmoe": ("attention_bias", "mup_enabled"),
    "cohere2": ("attention_bias",),
    "apertus": ("attention_bias",),
    "dots1": ("attention_bias", "norm_topk_prob"),
    "qwen2_moe": ("qkv_bias", "norm_topk_prob"),
    "glm4_moe_lite": ("attention_bias", "rope_interleave", "norm_topk_prob"),
    "olmo3": ("attention_bias",),
    "qwen3": ("attention_bias",),
    "olmo2": ("attention_bias",),
    "qwen3_moe": ("attention_bias", "norm_topk_prob"),
    "qwen3_5_text": ("attention_bias",),
    "qwen3_next": ("attention_bias", "norm_topk_prob"),
    "olmo_hybrid": ("attention_bias", "linear_allow_neg_eigval"),
    "nemotron_h": (
        "attention_bias",
        "mlp_bias",
        "use_conv_bias",
        "mamba_proj_bias",
        "use_bias",
        "norm_topk_prob",
    ),
    "lfm2": ("conv_bias",),
    "gpt2": ("scale_attn_by_inverse_layer_idx",),
    "granitemoehybrid": ("attention_bias", "mamba_conv_bias", "mamba_proj_bias"),
    "falcon_h1": (
        *("attention_bias", "mlp_bias", "projectors_bias", "mamba_conv_bias", "mamba_proj_bias"),
        *("mamba_rms_norm", "mamba_norm_before_gate"),
    ),
    "kimi_linear": ("moe_renormalize",),
    "jamba": ("mamba_conv_bias", "mamba_proj_bias"),
    "qwen3_5_moe_text": ("attention_bias",),
    "lfm2_moe": ("conv_bias", "use_expert_bias", "norm_topk_prob"),
    "granitemoe": ("attention_bias",),
    "gpt_oss": ("attention_bias",),
    "bamba": ("attention_bias", "mlp_bias", "mamba_conv_bias", "mamba_proj_bias"),
    "glm4_moe": ("attention_bias", "use_qk_norm", "norm_topk_prob"),
    "deepseek_v3": ("attention_bias", "rope_interleave", "norm_topk_prob"),
}
_OWN = {
    "llama": _llama,
    "arcee": _llama,
    "granite": _llama,
    "granite_swa": _granite_swa,
    "mistral": _llama,
    "ministral3": _ministral3,
    "seed_oss": _llama,
    "smollm3": _smollm3,
    "ernie4_5": _llama,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_dense": _llama,
    "starcoder2": _llama,
    "glm4": _glm4,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _attention_within,
    "apertus": _llama,
    "cohere2": _cohere2,
    "dots1": _dots1,
    "afmoe": _afmoe,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen2": _qwen3,
    "olmo3": _qwen3,
    "exaone4": _qwen3,
    "qwen3": _qwen3,
    "olmo2": _attention,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _qwen3_next,
    "olmo_hybrid": _olmo_hybrid,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "gpt2": _gpt2,
    "granitemoehybrid": _granitemoehybrid,
    "falcon_h1": _falcon_h1,
    "kimi_linear": _kimi_linear,
    "jamba": _jamba,
    "jet_nemotron": _jet_nemotron,
    "qwen3_5_moe_text": _qwen3_5_moe_text,
    "lfm2_moe": _lfm2_moe,
    "granitemoe": _granitemoe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "bamba": _bamba,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
}
