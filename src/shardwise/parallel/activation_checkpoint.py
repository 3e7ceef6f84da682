"""Activation checkpointing: keep a layer's input, compute the layer again in the backward (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dropout import DropoutState
from shardwise.models.spec import ModelSpec


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Recompute every decoder layer in its backward if `training.checkpointing` is `full`.

    A layer's forward is replaced rather than the layer wrapped: names stay, and fsdp2's hooks lie outside, so a layer's
    weights are gathered once for its recomputation and backward together.
    """
    if cfg.training.checkpointing == "full":
        for part in pm.parts:
            assert isinstance(part, CausalLM)
            for layer in spec.layers:
                module = part.get_submodule(f"hf.{layer.name}")
                module.forward = _recomputed(module.forward, part.dropout)
    return pm


def _recomputed(forward: Callable[..., torch.Tensor], dropout: DropoutState) -> Callable[..., torch.Tensor]:
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        batch = dropout.batch

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            # The backward may come after another micro-batch's forward (pipelines): go back to this one's masks.
            dropout.batch = batch
            return forward(*args, **kwargs)

        # No global random state is used in a layer (see models/dropout.py), so none is saved.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped
