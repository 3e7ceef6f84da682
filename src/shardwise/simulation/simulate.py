"""The peak of one rank of a run, by running a step of it without memory and without other ranks."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.assembly.build import Job, build
from shardwise.assembly.describe import describe
from shardwise.batches import Batch
from shardwise.config import RunConfig, UserError, require
from shardwise.interfaces import Mesh
from shardwise.parallel.mesh import build_mesh
from shardwise.simulation.allocations import StorageRecorder
from shardwise.simulation.moments import Moments
from shardwise.simulation.tensors import SimulatedTensors
from shardwise.training.measure import measure_memory
from shardwise.training.step import forward_backward

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulated:
    """What a simulated step of one rank took."""

    peak_bytes: int
    parts: dict[str, int]
    """Bytes at the peak by `records.memory_parts.PARTS`; they add up to `peak_bytes`."""
    moment: str
    """When the peak is, such as "backward of model.layers.3"."""
    seconds: float
    """How long the simulation took."""


def simulate(cfg: RunConfig, num_ranks: int, rank: int) -> Simulated:
    """Run one optimizer step of `rank` of `num_ranks` in a process of its own; see the module.

    UserError where the run may not begin, or where a simulation cannot follow it.
    """
    start = time.perf_counter()
    require(0 <= rank < num_ranks, f"there is no rank {rank}; give one from 0 to {num_ranks - 1}")
    _check(cfg)
    # In a fork nothing that the simulation changes of torch reaches the caller.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(cfg, num_ranks, rank, sender), daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the simulation ended with exit code {process.exitcode}") from None
    process.join()
    if isinstance(answer, BaseException):
        raise answer
    return replace(answer, seconds=time.perf_counter() - start)


def _check(cfg: RunConfig) -> None:
    """Raise UserError for what a simulation cannot follow."""
    way_out = "measure it with measure.memory, or read what the formulas say"
    require(
        cfg.parallel.data != "fsdp1",
        f"fsdp1 compares addresses of weights, which simulated tensors have not; {way_out}",
    )
    require(
        cfg.training.compile == "none",
        f"training.compile: a simulation sees operators, not what a compiler makes of them; {way_out}",
    )
    require(
        cfg.parallel.offload == "none",
        f"parallel.offload: a simulation has one device; {way_out}",
    )


def _run(cfg: RunConfig, num_ranks: int, rank: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        answer: Any = simulate_here(cfg, num_ranks, rank)
    except UserError as error:
        answer = error
    sender.send(answer)


def simulate_here(cfg: RunConfig, num_ranks: int, rank: int) -> Simulated:
    """Do the work of `simulate` in this process, whose torch is left with a process group."""
    is_gloo = cfg.training.device == "cpu"
    cfg = replace(cfg, training=replace(cfg.training, device="cpu"))
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    moments = Moments()
    recorder = StorageRecorder(moments.latest)
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_resizes())
        stack.enter_context(SimulatedTensors(recorder, copies_sums=is_gloo))
        mesh = build_mesh(cfg, CPU)
        job = build(cfg, mesh, Kept())
        batches = _batches(cfg, mesh, job)
        if cfg.parallel.pp > 1:  # torch sets its stages up in the first step
            forward_backward(job.pm, batches, mesh)
            job.optimizer.zero_grad(set_to_none=True)
        moments.watch(job.pm)
        memory = measure_memory(job, batches, mesh, cfg, recorder)
    peak, parts = memory.peak_bytes[0], memory.parts[0]
    return Simulated(peak, parts, recorder.peak_moment, 0.0)


class _All:
    def __contains__(self, key: object) -> bool:
        return True


class Kept:
    """A `State` after a first step that has every tensor and leaves its values as they are."""

    step = 1
    loss_scale = None
    keys: Any = _All()

    def check(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        """See State."""

    def read(self, key: str, portable: Any) -> torch.Tensor:
        """See State."""
        return portable()


def _batches(cfg: RunConfig, mesh: Mesh, job: Job) -> Sequence[Batch]:
    """Return the micro-batches of a step: full rows of one document each, all with targets."""
    slots, size = mesh.slots(cfg.training.global_batch_size), cfg.training.micro_batch_size
    vocabulary = job.hf.config.get_text_config().vocab_size
    shape = size, cfg.data.sequence_length
    batches = []
    for first in range(0, len(slots), size):
        ids = torch.arange(shape[0] * shape[1]).remainder_(vocabulary).view(shape)
        documents = torch.zeros_like(ids)
        batches.append(Batch(ids, ids.clone(), documents, tuple(slots[first : first + size]), 2))
    return batches
