"""Routed experts that compute as models/routed_experts.py says."""

import torch

from shardwise.config import RunConfig
from shardwise.models.capacity import Capacity
from shardwise.models.causal_lm import CausalLM
from shardwise.models.routed_experts import use_routed_experts


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the stacked experts of a part, and the adapters on them, compute as `RoutedExperts`."""
    factor = cfg.model.expert_capacity
    capacity = None if factor is None else Capacity(factor)
    half, documents = part.backward_half, part.rows_or_documents
    part.experts = use_routed_experts(part.hf, half, capacity, documents)
