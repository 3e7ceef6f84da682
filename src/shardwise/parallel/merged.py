"""LoRA's adapters merged into a copy of the frozen weights, once for all micro-batches of a step.

Memory per rank: a second copy of every weight that has an adapter, in the dtype of its products. Communication: none.
The weights themselves are never changed, and neither is what is saved.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
from torch import nn

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import Batch, Mesh, ParallelModel
from shardwise.models.lora_forward import merged_bytes, merged_weights
from shardwise.models.spec import ModelSpec
from shardwise.parallel.reduce import of_every_rank


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Once weights are real: merge before the micro-batches of each step, and of each evaluation."""
    whole = nn.ModuleList(pm.parts)
    check_fits(merged_bytes(whole, cfg.training.precision), mesh.device)
    merged = merged_weights(whole, cfg.training.precision)

    def run(now: ParallelModel, microbatches: Sequence[Batch], loss_scale: float, train: bool) -> torch.Tensor:
        with merged():
            return pm.run(now, microbatches, loss_scale, train)

    return replace(pm, run=run)


def check_fits(num_bytes: int, device: torch.device) -> None:
    """UserError, on every rank, if some rank's device has not so many bytes left; processes of a machine share its CPU.

    What activations will take is not known here and comes on top.
    """
    # The name of a machine and a number, from every rank to all.
    ranks = of_every_rank((platform.node(), free_bytes(device)))
    nodes = [node for node, _ in ranks]
    free = min(left if device.type == "cuda" else left // nodes.count(node) for node, left in ranks)
    if num_bytes > free:
        raise UserError(
            f"lora.merged copies {num_bytes:,} bytes of weights, but a rank has only {free:,} bytes left; set "
            "lora.merged to false"
        )


def free_bytes(device: torch.device) -> int:
    """What may still be taken there: of a GPU with what torch's allocator holds and does not use."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
