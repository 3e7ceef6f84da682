"""The peak of one rank of a run, by a step that is run with neither memory nor other ranks.

The model, its adapters, cores, strategies, activation checkpoints and optimizer are those of a run:
`build` makes them, and `measure_memory` runs the step and records its peak, as it does for real.
Three things are not real: tensors (see tensors.py), the process group, which is torch's fake one,
and the tokens.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.assembly.build import Job, build
from shardwise.base.batches import Batch
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import num_data_ranks, num_microbatches
from shardwise.config import Lora, RunConfig, UserError, require
from shardwise.parallel.mesh import build_mesh
from shardwise.training.measure import measure_memory
from shardwise.training.step import forward_backward
from tests.oracles.allocations import StorageRecorder
from tests.oracles.moments import Moments
from tests.oracles.tensors import WAY_OUT, NumbersAreOne, SimulatedTensors

UNLIKE = 3
"""Micro-batches whose memory differs: the first finds no gradients, the last sums them over ranks,
and all between them are alike."""
ALIKE = 2
"""Under 1f1b a rank of p keeps of many micro-batches what it keeps of 2 p, except for their losses:
the first p fill the pipeline. Other schedules are simulated in full."""


@dataclass(frozen=True)
class Simulated:
    """What a simulated step of one rank took."""

    peak_bytes: int
    parts: dict[str, int]
    """Bytes at the peak by `records.memory_parts.PARTS`; they add up to `peak_bytes`."""
    moment: str
    """When the peak was, such as "backward of model.layers.3"."""
    seconds: float
    """How long the simulation took."""


def simulate(cfg: RunConfig, num_ranks: int, rank: int) -> Simulated:
    """Run one optimizer step of `rank` of `num_ranks` without memory, and return its peak.

    UserError where the run may not begin, or where a simulation cannot follow it.
    """
    start = time.perf_counter()
    require(0 <= rank < num_ranks, f"there is no rank {rank}; give one from 0 to {num_ranks - 1}")
    check(cfg)
    # In a fork, so that the process group and what is replaced of torch never reach the caller.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    arguments = cfg, num_ranks, rank, sender
    process = context.Process(target=_simulate_and_send, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the simulation ended with exit code {process.exitcode}") from None
    process.join()
    if isinstance(answer, UserError):
        raise answer
    return replace(answer, seconds=time.perf_counter() - start)


def check(cfg: RunConfig) -> None:
    """Raise UserError for a run that a simulation cannot follow."""
    refused = {
        "training.compile": (cfg.training.compile != "none", "compiled code hides its operators"),
        "parallel.offload": (cfg.parallel.offload != "none", "it has the memory of one device"),
        "training.offload_activations": (
            cfg.training.offload_activations,
            "it has the memory of one device",
        ),
        "parallel.data fsdp1": (
            cfg.parallel.data == "fsdp1",
            "its parameters are views into flat ones, and torch's FakeTensor cannot fill them",
        ),
    }
    for key, (is_refused, reason) in refused.items():
        require(not is_refused, f"{key} cannot be simulated: {reason}; {WAY_OUT}")


def _simulate_and_send(cfg: RunConfig, num_ranks: int, rank: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(_simulate(cfg, num_ranks, rank))
    except UserError as error:
        sender.send(error)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"the step cannot be simulated: {error} needs the values of weights; {WAY_OUT}"
        sender.send(UserError(message))


def _simulate(cfg: RunConfig, num_ranks: int, rank: int) -> Simulated:
    uses_gloo = cfg.training.device == "cpu"
    cfg = replace(cfg, training=replace(cfg.training, device="cpu"))
    whole = cfg
    # A split by cost depends on how many micro-batches there are.
    is_split_alike = cfg.parallel.split not in ("balanced", "dynamic")
    if cfg.parallel.pp > 1 and cfg.parallel.schedule == "1f1b" and is_split_alike:
        cfg = _with_fewer_rows(cfg, num_ranks)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    moments = Moments()
    recorder = StorageRecorder(moments.latest)
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_resizes())
        stack.enter_context(SimulatedTensors(recorder, copies_whole=uses_gloo))
        stack.enter_context(NumbersAreOne())
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh, AfterOneStep())
        batches = full_batches(whole, mesh, job)
        number = UNLIKE if job.cut is None else num_microbatches(cfg, num_ranks)
        batches, others = batches[:number], [b.to(mesh.device) for b in batches[number:]]
        if job.cut is not None:
            _know_lower_stages(job)
            # torch's stages allocate more in their first step.
            forward_backward(job.pm, batches, mesh)
            job.optimizer.zero_grad(set_to_none=True)
        memory = measure_memory(moments.watched(job), batches, mesh, cfg, recorder)
        del others  # not before: a step holds all its micro-batches
    return Simulated(memory.peak_bytes[0], memory.parts[0], recorder.peak_moment, seconds=0.0)


def _with_fewer_rows(cfg: RunConfig, num_ranks: int) -> RunConfig:
    """Return the run of a pipeline with as few micro-batches as its memory needs."""
    number = min(num_microbatches(cfg, num_ranks), ALIKE * cfg.parallel.pp)
    rows = number * cfg.training.micro_batch_size * num_data_ranks(cfg, num_ranks)
    return replace(cfg, training=replace(cfg.training, global_batch_size=rows))


class _AnyKey(Set[str]):
    """The keys of a state that has a tensor for whatever key it is asked."""

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class AfterOneStep:
    """A `State` with every weight and optimizer state, which leaves memory as it is."""

    step: int = 1
    loss_scale: Mapping[str, float | int | bool] | None = None
    lora: Lora | None = None
    keys: Collection[str] = _AnyKey()

    def check(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> None:
        """See State: it fits any model."""

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See State."""
        return portable()


def full_batches(cfg: RunConfig, mesh: Mesh, job: Job) -> list[Batch]:
    """Return a step's micro-batches on this rank: each row is one document, and all are targets."""
    shape = cfg.training.micro_batch_size, cfg.data.sequence_length
    slots = mesh.slots(cfg.training.global_batch_size)
    ids = torch.arange(shape[0] * shape[1]).remainder_(job.run.hf.config.vocab_size).view(shape)
    return [
        Batch(ids, ids, torch.zeros_like(ids), tuple(slots[first : first + shape[0]]), step=2)
        for first in range(0, len(slots), shape[0])
    ]


def _know_lower_stages(job: Job) -> None:
    """Say to this rank's stages what other ranks would: which chunk is the lowest to be trained."""
    assert job.cut is not None
    chunks = job.cut.split.chunks
    assert isinstance(job.pm.run, MethodType)
    runner: Any = job.pm.run.__self__
    trained = [number for number, chunk in enumerate(chunks) if chunk.gradient_bytes]
    runner.lowest = min(runner.lowest, *trained)
