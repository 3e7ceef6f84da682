"""LoRA's adapters merged into a copy of the frozen weights, once for all micro-batches of a step.

Memory per rank: a second copy of every weight that has an adapter, in the dtype of its products. Communication: none.
The weights themselves are never changed, and neither is what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.config import RunConfig
from shardwise.interfaces import Batch, Mesh, ParallelModel
from shardwise.models.lora_forward import merged_dtype, merged_weights
from shardwise.models.spec import ModelSpec


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Once weights are real: merge before the micro-batches of each step, and of each evaluation."""
    merged = merged_weights(nn.ModuleList(pm.parts), merged_dtype(cfg.training.precision))

    def run(now: ParallelModel, microbatches: Sequence[Batch], loss_scale: float, train: bool) -> torch.Tensor:
        with merged():
            return pm.run(now, microbatches, loss_scale, train)

    return replace(pm, run=run)
