"""Embeddings that require a gradient although nothing below them is trained."""

import torch
from torch import nn

from shardwise.base.schedules import HALVING
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let embedded tokens require a gradient where the schedule halves backwards.

    The first half of such a backward starts at the gradient of a stage's input. Without one, the
    gradients of the stage's weights would be lost.
    """
    if part.spec.first and cfg.parallel.schedule in HALVING:
        # A hook, since tensor parallelism replaces the embedding's forward.
        part.hf.get_submodule(part.spec.embed).register_forward_hook(_require_gradient)


def _require_gradient(embed: nn.Module, args: object, embedded: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
