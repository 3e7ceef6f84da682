"""What a run leaves behind for others: `adapter/` in PEFT's format, or `model/` in transformers'."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.config import RunConfig
from shardwise.models.adapter import save_adapter
from shardwise.models.save import save_model
from shardwise.parallel.place import full_tensor
from shardwise.training.build import Job
from shardwise.training.checkpoint_folder import UNFINISHED
from shardwise.training.watchdog import beat


def save_result(job: Job, cfg: RunConfig, output_dir: Path) -> Path | None:
    """Write the adapter (LoRA) or the model (full) from any layout; the folder on rank 0, None elsewhere.

    Tensors are gathered one by one, and only rank 0 keeps them: adapters together, a model's up to one file's worth.
    The folder gets its name when all is written: one that is there is whole.
    """
    (part,) = job.pm.parts
    whole = _whole_tensors(job, trainable_only=cfg.lora is not None)
    if dist.get_rank() != 0:
        deque(whole, maxlen=0)  # takes part in the gathering
        return None
    folder = output_dir / ("model" if cfg.lora is None else "adapter")
    unfinished = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    if cfg.lora is None:
        save_model(part.hf, whole, unfinished)
    else:
        save_adapter(part.hf, cfg.lora, dict(whole), unfinished, cfg.model.path)
    shutil.rmtree(folder, ignore_errors=True)  # of the run that this one goes on from
    return unfinished.rename(folder)


def _whole_tensors(job: Job, trainable_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in job.pm.named_parameters():
        if parameter.requires_grad or not trainable_only:
            # An all-gather of one parameter's shards, if it is sharded; every rank must come by here.
            yield name, full_tensor(job.pm.to_portable(name, parameter)).to("cpu", copy=True)
            beat()  # rank 0 has written it, and at most a file's worth with it
    if not trainable_only:
        (part,) = job.pm.parts
        persistent = part.hf.state_dict(keep_vars=True)
        yield from ((name, buffer.cpu()) for name, buffer in part.hf.named_buffers() if name in persistent)
