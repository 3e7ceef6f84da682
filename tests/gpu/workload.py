"""What is timed: a model, a batch, and how often. Imports nothing but the standard library."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


@dataclass(frozen=True)
class Workload:
    """LoRA on a model of this transformers config, and how its steps are timed."""

    model: dict[str, Any]
    batch: int  # rows in a step, one micro-batch
    sequence_length: int
    rounds: int  # of each side, in turns
    warmup_steps: int
    round_seconds: float  # a round has as many steps as take about this long, at least one
    r: int = 16
    alpha: float = 32.0
    lr: float = 2e-4
    max_grad_norm: float = 1.0
    seed: int = 0


def preset(name: str) -> dict[str, Any]:
    """Return the config of a model of configs/models."""
    return json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))


LORA_STEP = Workload(
    # The published shape except for the vocabulary (248,320 there): float32 logits of 8,192 tokens
    # take 2 GiB.
    preset("qwen3_5-0.8b") | {"vocab_size": 65536},
    batch=4,
    sequence_length=2048,
    rounds=4,
    warmup_steps=3,
    round_seconds=1.0,
)
JET_NEMOTRON_STEP = replace(
    LORA_STEP, model=preset("jet-nemotron-2b"), batch=1, sequence_length=4096, round_seconds=3.0
)
REHEARSAL = Workload(
    preset("tiny-qwen3_5"), batch=2, sequence_length=70, rounds=3, warmup_steps=2, round_seconds=0.1
)
"""The same code on a toy, on the CPU: everything except the device."""
JET_NEMOTRON_REHEARSAL = replace(REHEARSAL, model=preset("jet-nemotron-tiny"))
WORKLOADS = {
    "qwen3_5": (LORA_STEP, REHEARSAL),
    "jet_nemotron": (JET_NEMOTRON_STEP, JET_NEMOTRON_REHEARSAL),
}
"""By name: on a device, and on the CPU."""


def workload_of(name: str, device_type: str) -> Workload:
    """Return what is timed under a name on cuda or cpu."""
    on_a_device, rehearsal = WORKLOADS[name]
    return on_a_device if device_type == "cuda" else rehearsal


def _gated_delta_net() -> dict[str, Any]:
    """Return the sizes of the recurrent layers of LORA_STEP, which fla's kernels are tuned for."""
    names = (name for name in LORA_STEP.model if name.startswith("linear_"))
    return {name: LORA_STEP.model[name] for name in names}


def _jet_block() -> dict[str, Any]:
    timed = JET_NEMOTRON_STEP.model["efficient_attention_config"]
    tiny = JET_NEMOTRON_REHEARSAL.model["efficient_attention_config"]
    return {"efficient_attention_config": tiny | {"jet": timed["jet"]}}


FLA_SHAPES = {"tiny-qwen3_5": _gated_delta_net(), "tiny-jet_nemotron": _jet_block()}
"""What a tiny model takes over from the one that is timed, where fla's kernels are tested."""
