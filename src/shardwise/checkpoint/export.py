"""What a run leaves behind for others: `adapter/` in PEFT's format, or `model/` in transformers'."""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from shardwise.assembly.build import Job
from shardwise.checkpoint.folder import UNFINISHED
from shardwise.config import RunConfig
from shardwise.interfaces import Mesh
from shardwise.models.adapter import save_adapter
from shardwise.models.save import save_for_generation, save_model
from shardwise.parallel.place import full_tensor
from shardwise.process.watchdog import beat


def save_result(
    job: Job,
    cfg: RunConfig,
    mesh: Mesh,
    output_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path | None:
    """Write the adapter (LoRA) or the model (full) from any layout, with the tokenizer that it was trained with.

    Return the folder on rank 0, None elsewhere.

    Tensors are gathered one by one, and only rank 0 keeps them: adapters together, a model's up to one file's worth.
    The folder gets its name when all is written: one that is there is whole.
    """
    whole = _whole_tensors(job, mesh, trainable_only=cfg.lora is not None)
    if dist.get_rank() != 0:
        deque(whole, maxlen=0)  # takes part in the gathering
        return None
    folder = output_dir / ("model" if cfg.lora is None else "adapter")
    if not output_dir.is_dir():  # removed or moved; to make it again would separate what is in it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    unfinished = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    if cfg.lora is None:
        save_model(job.hf, whole, unfinished)
        save_for_generation(unfinished, tokenizer, cfg.model.path)
    else:
        save_adapter(job.hf, cfg.lora, dict(whole), unfinished, cfg.model.path)
        save_for_generation(unfinished, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)  # of the run that this one goes on from
    return unfinished.rename(folder)


def _whole_tensors(
    job: Job, mesh: Mesh, trainable_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, whole, on the CPU of rank 0; on every other rank those of its own stages."""
    group = mesh.dense.get_group("pp")
    first, *others = dist.get_process_group_ranks(group)
    rank = dist.get_rank()
    sending = first == 0 and rank != 0  # one pipeline of several is enough
    seen = set()  # a tied weight is held twice
    for name, tensor in _own_tensors(job, trainable_only):
        seen.add(name)
        if sending:
            # To rank 0, what it is and then itself.
            dist.send_object_list([(name, tensor.shape, tensor.dtype)], 0, group, mesh.device)
            dist.send(tensor.to(mesh.device), 0, group)
        yield name, tensor
        beat()  # rank 0 has written it, and at most a file's worth with it
    if sending:
        dist.send_object_list([None], 0, group, mesh.device)
    for other in others if rank == 0 else ():
        while (told := _told_by(other, group, mesh.device)) is not None:
            name, shape, dtype = told
            tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.recv(tensor, other, group)
            if name not in seen:
                yield name, tensor.cpu()
            seen.add(name)
            beat()


def _told_by(
    rank: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[str, torch.Size, torch.dtype] | None:
    told: list[Any] = [None]
    dist.recv_object_list(told, rank, group, device)
    return told[0]


def _own_tensors(job: Job, trainable_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in job.pm.named_parameters():
        if parameter.requires_grad or not trainable_only:
            # An all-gather of one parameter's shards, if it is sharded; every rank of the stage must come by here.
            yield name, full_tensor(job.pm.to_portable(name, parameter)).to("cpu", copy=True)
    for part in () if trainable_only else job.pm.parts:
        persistent = part.hf.state_dict(keep_vars=True)
        yield from (
            (name, buffer.cpu()) for name, buffer in part.hf.named_buffers() if name in persistent
        )
