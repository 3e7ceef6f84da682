"""The result of a run: `adapter/` in PEFT's format, or `model/` in transformers' format."""

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from shardwise.assembly.build import Job
from shardwise.assembly.state import portable_weights
from shardwise.base.interfaces import Mesh
from shardwise.base.process.watchdog import beat
from shardwise.checkpoint.folder import UNFINISHED
from shardwise.config import Model, RunConfig, UserError
from shardwise.models.adapters.peft_config import section_of_layers
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.load import other_weights
from shardwise.models.save import SHARD_BYTES, save_for_generation, save_model, write_shards
from shardwise.parallel.place import full_tensor

DISK_SHARD_BYTES = 2**27
"""The most bytes of weights in one file, and so in memory, where `parallel.offload` is disk."""


def save_result(
    job: Job,
    cfg: RunConfig,
    mesh: Mesh,
    output_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Path | None:
    """Write the adapter (LoRA) or the model (full) from any layout, with the run's tokenizer.

    With a model goes all else that the base's files have; `note` gets a line where it cannot.

    Return the folder on rank 0, None elsewhere. Tensors are gathered one by one, and only rank 0
    keeps them: all of an adapter's, or up to one file's worth of a model's. The folder gets its
    name when it is complete.
    """
    tensors = _full_tensors(job, mesh, trained_only=cfg.lora is not None)
    if dist.get_rank() != 0:
        deque(tensors, maxlen=0)  # takes part in the gathering
        return None
    folder = output_dir / ("model" if cfg.lora is None else "adapter")
    begun_in = output_dir.stat()
    unfinished = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    if job.run.spec.is_own:
        write_shards(tensors, unfinished)
    elif cfg.lora is None:
        # Random weights have no files, and so nothing beside the language model.
        whole = job.run.multimodal if cfg.model.init == "weights" else None
        size = DISK_SHARD_BYTES if cfg.parallel.offload == "disk" else SHARD_BYTES
        others = _others(job, cfg.model, note)
        save_model(job.run.hf, tensors, unfinished, size, whole, others)
        save_for_generation(unfinished, tokenizer, cfg.model.path)
    else:
        path, multimodal = cfg.model.path, job.run.multimodal
        section = section_of_layers(cfg.lora, job.run.hf)
        save_adapter(job.run.hf, section, dict(tensors), unfinished, path, multimodal)
        save_for_generation(unfinished, tokenizer)
    if not os.path.samestat(begun_in, output_dir.stat()):
        # Removed or moved on the way; the new one holds nothing but this result.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    shutil.rmtree(folder, ignore_errors=True)  # of the run that this one resumed
    return unfinished.rename(folder)


def _others(
    job: Job, model: Model, note: Callable[[str], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the base's files have beside the model; a base that is gone costs no result."""
    try:
        for entry in other_weights(job.run.hf, model):
            yield entry
            beat()
    except (UserError, OSError) as error:
        note(f"model/ lacks what the base has beside {type(job.run.hf).__name__}: {error}")


def _full_tensors(job: Job, mesh: Mesh, trained_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every full tensor on the CPU of rank 0; on every other rank those of its own stages."""
    group = mesh.dense.get_group("pp")
    first, *others = dist.get_process_group_ranks(group)
    rank = dist.get_rank()
    is_sender = first == 0 and rank != 0  # one pipeline of several is enough
    names = set()  # two stages hold a tied weight
    for name, portable in portable_weights(job.pm, trained_only):
        # An all-gather of one parameter's shards, if it is sharded, by every rank of the stage.
        tensor = full_tensor(portable).to("cpu", copy=True)
        names.add(name)
        if is_sender:
            # To rank 0: first name, shape and dtype, then the tensor.
            dist.send_object_list([(name, tensor.shape, tensor.dtype)], 0, group, mesh.device)
            dist.send(tensor.to(mesh.device), 0, group)
        yield name, tensor
        beat()  # rank 0 has written it, and at most a file's worth with it
    if is_sender:
        dist.send_object_list([None], 0, group, mesh.device)
    for other in others if rank == 0 else ():
        header: list[Any] = [None]
        while True:
            dist.recv_object_list(header, other, group, mesh.device)
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.recv(tensor, other, group)
            if name not in names:
                yield name, tensor.cpu()
            names.add(name)
            beat()
