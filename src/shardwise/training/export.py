"""What a run leaves behind for others: `adapter/` in PEFT's format, or `model/` in transformers'."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh
from shardwise.models import load, lora
from shardwise.parallel.place import full_tensor
from shardwise.training.build import Job


def save_result(job: Job, cfg: RunConfig, mesh: Mesh, output_dir: Path) -> Path | None:
    """Write the adapter (LoRA) or the model (full) from any layout; the folder on rank 0, None elsewhere.

    Tensors are gathered one by one and only rank 0 keeps them, in host memory.
    """
    main = dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, parameter in job.pm.named_parameters():
        if cfg.lora is None or parameter.requires_grad:
            full = full_tensor(parameter.detach())
            if main:
                state[name] = full.to("cpu", copy=True)
    if not main:
        return None
    (part,) = job.pm.parts
    if cfg.lora is not None:
        folder = output_dir / "adapter"
        lora.save_adapter(part.hf, cfg.lora, state, folder, cfg.model.path)
    else:
        folder = output_dir / "model"
        load.save_model(part.hf, state, folder)
    return folder
