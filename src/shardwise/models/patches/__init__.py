"""Patches that replace a forward of transformers, in the order in which they are applied.

Each patch is a function `apply(part, cfg, device)`, which reads in the run file whether there is
anything to do. A forward is replaced rather than a module wrapped: names stay, and LoRA,
checkpointing and sharding see what they always see. A later patch wraps what an earlier one left.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.patches import (
    attention,
    cores,
    dropout,
    elementwise,
    embedding,
    experts,
    float8,
    forget_gate,
    isolation,
    lora_kernel,
    loss,
    rotary,
    router_loss,
    xielu,
)

Patch = Callable[[Any, RunConfig, torch.device], None]
"""Takes a CausalLM or, where FOR_ANY_MODULE names the patch, any part."""

PATCHES: tuple[tuple[str, Patch], ...] = (
    ("dropout masks by row", dropout.apply),
    ("embeddings with a gradient", embedding.apply),
    ("cores", cores.apply),
    ("attention kernel", attention.apply),
    ("routed experts", experts.apply),
    ("finite forget gates", forget_gate.apply),
    ("smooth xIELU", xielu.apply),
    ("norms and gated MLPs", elementwise.apply),
    ("rotary positions by document", rotary.apply),
    ("isolated documents", isolation.apply),  # around mixers; gives their dropouts the documents
    ("router loss", router_loss.apply),
    ("loss in the head", loss.apply),
    ("FP8 products", float8.apply),
    ("LoRA kernel", lora_kernel.apply),  # inside mixers and blocks; replaces what PEFT computes
)

FOR_ANY_MODULE = {"dropout masks by row"}
"""The patches that act on a module of the caller too."""


def patch(part: CausalLM, cfg: RunConfig, device: torch.device) -> CausalLM:
    """Apply all patches to a part of a model, before any strategy is applied, and return it."""
    for _, apply in PATCHES:
        apply(part, cfg, device)
    return part
