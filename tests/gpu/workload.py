"""What is timed: a model, a batch, and how often. Imports nothing but the standard library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs" / "models"

_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GDN_SHAPE = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Gated DeltaNet as the model of LORA_STEP has it. Triton compiles and tunes fla's kernels for a
shape once.
"""


def _layers(blocks: int) -> dict[str, Any]:
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * blocks
    return {"num_hidden_layers": len(types), "layer_types": types}


@dataclass(frozen=True)
class Workload:
    """LoRA on a model of this transformers config, and how its steps are timed."""

    model: dict[str, Any]
    batch: int  # rows in a step, one micro-batch
    sequence_length: int
    rounds: int  # of each side, in turns
    warmup_steps: int
    round_seconds: float  # a round is as many steps as take about this long, at least one
    r: int = 16
    alpha: float = 32.0
    lr: float = 2e-4
    max_grad_norm: float = 1.0
    seed: int = 0


LORA_STEP = Workload(
    # Qwen3.5-0.8B's published shape but for the vocabulary (248,320 there): float32 logits of 8,192
    # tokens take 2 GiB.
    model={
        **_HYBRID,
        **GDN_SHAPE,
        **_layers(6),
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
    },
    batch=4,
    sequence_length=2048,
    rounds=4,
    warmup_steps=3,
    round_seconds=1.0,
)
REHEARSAL = Workload(
    model={
        **_HYBRID,
        **_layers(1),
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    batch=2,
    sequence_length=70,
    rounds=3,
    warmup_steps=2,
    round_seconds=0.1,
)
"""The same code on a toy, on the CPU: everything but the device."""


def _jet_nemotron(size: str) -> dict[str, Any]:
    return json.loads(
        (CONFIGS / f"jet-nemotron-{size}" / "config.json").read_text(encoding="utf-8")
    )


JET_NEMOTRON_STEP = Workload(
    _jet_nemotron("2b"), batch=1, sequence_length=4096, rounds=4, warmup_steps=3, round_seconds=3.0
)
JET_NEMOTRON_REHEARSAL = Workload(
    _jet_nemotron("tiny"), batch=2, sequence_length=70, rounds=3, warmup_steps=2, round_seconds=0.1
)
WORKLOADS = {
    "qwen3_5": (LORA_STEP, REHEARSAL),
    "jet_nemotron": (JET_NEMOTRON_STEP, JET_NEMOTRON_REHEARSAL),
}
"""By name: on a device, and on the CPU."""


def workload_of(name: str, device_type: str) -> Workload:
    """What is timed under a name on cuda or cpu."""
    on_a_device, rehearsal = WORKLOADS[name]
    return on_a_device if device_type == "cuda" else rehearsal


def _blocks(size: str) -> dict[str, Any]:
    return _jet_nemotron(size)["efficient_attention_config"]


FLA_SHAPES: dict[str, dict[str, Any]] = {
    "tiny-qwen3_5": GDN_SHAPE,
    "tiny-jet_nemotron": {
        "efficient_attention_config": _blocks("tiny") | {"jet": _blocks("2b")["jet"]}
    },
}
"""What a tiny model takes over from the one that is timed, where fla's kernels are tested."""
