"""The small models whose layers a calibration measures, and how large all is that it measures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training

DeviceType = Literal["cpu", "cuda"]


class Scale(NamedTuple):
    """How large the things are that are measured on a kind of device."""

    dtype: Literal["float32", "bfloat16"]
    """The dtype of products and weights."""
    sizes: tuple[int, ...]
    """Rows, inner sizes and columns of products."""
    points: tuple[tuple[int, int, int], ...]
    """Hidden sizes of the models, rows, and tokens of a row."""
    vocabulary: int
    updated: tuple[tuple[int, int], tuple[int, int]]
    """The elements of tensors that AdamW updates, and how many there are."""
    copied: int
    """Elements of float32."""


SCALES = {
    "cpu": Scale(
        dtype="float32",
        sizes=(8, 64, 256, 1024),
        # Rows and lengths tell the elements of a layer from its core.
        points=((128, 1, 128), (128, 4, 128), (128, 1, 512), (320, 1, 128), (320, 4, 128)),
        vocabulary=1024,
        updated=((256, 64), (2**18, 16)),
        copied=2**23,
    ),
    "cuda": Scale(
        dtype="bfloat16",
        sizes=(16, 64, 256, 1024, 2048, 4096, 8192),
        points=(
            (1024, 1, 2048),
            (1024, 4, 2048),
            (1024, 1, 8192),
            (2048, 1, 2048),
            (2048, 4, 2048),
        ),
        vocabulary=32768,
        updated=((256, 256), (2**26, 4)),
        copied=2**28,
    ),
}
"""The scale of each type of device."""


class Size(NamedTuple):
    """How large a measured model is, and where it runs."""

    device: DeviceType
    width: int
    """The hidden size."""
    num_heads: int
    length: int
    """Tokens of a row."""


def _qwen3(_: Size) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _qwen3_5(size: Size) -> dict[str, Any]:
    # fla compiles its kernels for each number of heads, and tunes them: for minutes.
    on_cuda = size.device == "cuda"
    num_heads, head_dim = (16, 128) if on_cuda else (size.num_heads, size.width // size.num_heads)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }


def _bamba(size: Size) -> dict[str, Any]:
    if size.device == "cuda":  # about as large as those that are published
        mixer = {
            "mamba_d_state": size.width // 8,
            "mamba_chunk_size": 256,
            "mamba_n_heads": size.width // 32,
            "mamba_d_head": 64,
        }
    else:  # States and chunks that follow width and tokens tell the core's FLOPs from its elements.
        mixer = {
            "mamba_d_state": size.width // 4,
            "mamba_chunk_size": size.length // 4,
            "mamba_n_heads": 8,
            "mamba_d_head": 2 * size.width // 8,
        }
    return {
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [1, 3, 5],
        "mamba_n_groups": 1,
        **mixer,
    }


def _kimi_linear(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "dense", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": size.width // 2,
        "qk_nope_head_dim": size.width // 4,
        "qk_rope_head_dim": size.width // 8,
        "v_head_dim": size.width // 4,
        "linear_num_heads": 4,
        "linear_head_dim": size.width // 4,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": size.width,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
    }


def _jamba(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["JambaForCausalLM"],
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_expand": 2,
        "mamba_d_state": size.width // 8,
        "mamba_d_conv": 4,
        "mamba_dt_rank": size.width // 16,
    }


def _lfm2(_: Size) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"] * 3,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    }


def _jet_nemotron(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["JetNemotronForCausalLM"],
        "layer_types": ["jet", "swa", "attn"] * 2,
        "efficient_attention_config": {
            "jet": {
                "num_heads": 4,
                "head_dim": size.width // 4,
                "expand_v": 2.0,
                "conv_size": 4,
                "dconv_generator_reduction": 8,
                "norm_eps": 1e-5,
            },
            "swa": {"window_size": 64},
        },
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


Architecture = Callable[[Size], dict[str, Any]]
REFERENCES: dict[str, Architecture] = {"qwen3_5_text": _qwen3_5, "bamba": _bamba, "qwen3": _qwen3}
"""Families whose layers are measured, each in models of six layers: so many lie in no cache."""
OTHERS: dict[str, Architecture] = {
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "jet_nemotron": _jet_nemotron,
}
"""Families of which only those kinds of layers are measured that none before has. On a GPU
they are not: fla and Triton would compile kernels for each of them."""


def reference_run(
    folder: Path,
    device: DeviceType,
    model_type: str,
    point: tuple[int, int, int],
    lora: Lora | None,
) -> RunConfig:
    """Return a run of one micro-batch with a small model, whose config is written to the folder."""
    scale, (width, rows, length) = SCALES[device], point
    heads = width // 128 if device == "cuda" else 4
    architecture = {**REFERENCES, **OTHERS}[model_type]
    config = {
        "model_type": model_type,
        "vocab_size": scale.vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 6,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2**15,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        **architecture(Size(device, width, heads, length)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    training = Training(
        output_dir="-",
        global_batch_size=rows,
        micro_batch_size=rows,
        device=device,
        precision=scale.dtype,
    )
    data = Data("-", sequence_length=length)
    model = Model(str(folder), init="random", dtype=scale.dtype)
    return RunConfig(model, data, training, lora, Parallel())
