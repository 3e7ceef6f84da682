"""Pipeline parallelism: each rank holds some of the layers and passes hidden states on.

Memory per rank: weights, gradients and optimizer states of its stages, and the activations of the
micro-batches that its schedule has in flight. Communication per micro-batch and cut: hidden states
[B, T, D] up, and their gradient of the same size back where something below is trained. The
schedules and their transport are `torch.distributed.pipelining`'s. Its stages are built at the
first step, from what later strategies have made of `pm.parts`.
tests/parallel/test_torch_pipelining.py shows what torch gets wrong, which rules refuse.
Sources: GPipe arXiv 1811.06965; 1F1B and interleaved arXiv 2104.04473; zero bubble and ZB-V arXiv
2401.10241; DualPipe-V arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.batches import AnyBatch, Batch
from shardwise.base.interfaces import Mesh, ParallelModel, ParameterFacts
from shardwise.base.layouts import num_microbatches
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.timeline import Event
from shardwise.base.schedules import BATCHING, HALVING, ONE_STAGE
from shardwise.config import RunConfig, require
from shardwise.models.part import StagePart as Part
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import local
from shardwise.parallel.reduce import from_every_rank

# A run without a pipeline imports nothing of torch's.
if TYPE_CHECKING:
    from shardwise.parallel.pipeline_stage import ScheduledStage

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Classes of `torch.distributed.pipelining`."""


def pipeline_of(cfg: RunConfig, num_ranks: int) -> Pipeline | None:
    """Return the schedule of a run on so many ranks in all; None without a pipeline."""
    if cfg.parallel.pp == 1:
        return None
    parallel, microbatches = cfg.parallel, num_microbatches(cfg, num_ranks)
    shape = (parallel.schedule, parallel.pp, microbatches, parallel.num_virtual)
    return Pipeline(*shape, speeds=tuple(parallel.speeds or ()))


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let the parts, which are this rank's stages, work in the order of the run's schedule."""
    pipeline = pipeline_of(cfg, mesh.dense.size())
    assert pipeline is not None, "the order asks for it where there is one"
    chunks = pipeline.chunks_of(mesh.rank("pp"))
    parts = [part for part in pm.parts if isinstance(part, Part)]
    trained = [
        chunk
        for chunk, part in zip(chunks, parts, strict=True)
        if any(parameter.requires_grad for parameter in part.parameters())
    ]
    # A few chunk numbers go from every rank to all.
    lowest = min(chain(*from_every_rank(trained)), default=pipeline.num_chunks)
    if cfg.parallel.schedule in HALVING:
        lowest = 0  # See models/patches/embedding.py.
    runner = _Runner(pipeline, chunks, lowest, mesh)
    pm = replace(pm, run=runner.run, next_token=runner.next_token, events=runner.events)
    return _tie(pm, mesh, spec) if spec.tied and cfg.lora is None and not pipeline.v_shaped else pm


class _Runner:
    """Runs micro-batches through the stages.

    There is one torch schedule for each number and shape of micro-batches.
    """

    def __init__(
        self, pipeline: Pipeline, chunks: tuple[int, ...], lowest: int, mesh: Mesh
    ) -> None:
        from shardwise.parallel.pipeline_stage import Clock

        self.pipeline, self.chunks, self.mesh = pipeline, chunks, mesh
        self.lowest = lowest
        """The lowest chunk that trains something; those below it run no backward."""
        self.group = mesh.group("pp")
        self.clock = Clock(mesh.device)
        self.schedules: dict[tuple[int, ...], tuple[Any, list[ScheduledStage]]] = {}
        self.latest: list[ScheduledStage] = []
        """The stages that ran the latest training step."""
        self.loss_scale = 1.0
        self.losses: list[torch.Tensor] = []

    def run(
        self, pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        """See interfaces.Run. The last stage's rank has the loss, others their router losses."""
        from shardwise.parallel.pipeline_stage import errors_as_they_are

        for shard in pm.shard_batch:
            microbatches = [shard(batch) for batch in microbatches]
        parts = [part for part in pm.parts if isinstance(part, Part)]
        hidden = [parts[0].passed_on(batch) for batch in microbatches]
        key = (len(microbatches), *hidden[0].shape)
        # Micro-batches of different shapes would end gloo, and with it the run.
        is_one_shape = all(states.shape == hidden[0].shape for states in hidden)
        require(is_one_shape, "a pipeline's micro-batches differ in shape; pad them to one")
        if key not in self.schedules:
            self.schedules[key] = self._schedule(parts, len(microbatches), hidden[0])
        schedule, stages = self.schedules[key]
        zero = torch.zeros((), device=self.mesh.device)
        for part in parts:
            part.train(train)
            part.microbatches, part.loss_scale, part.router_total = microbatches, loss_scale, zero
        self.losses, self.loss_scale = [], loss_scale
        if train:
            self.latest = stages
            for stage in stages:
                stage.moments.clear()
            self.clock.start(self.group)
        # Stages look their micro-batches up by number. torch passes the numbers to each stage, and
        # hidden states between them.
        numbers = torch.arange(len(microbatches))
        inputs = (numbers,) if 0 in self.chunks else ()
        with torch.set_grad_enabled(train), errors_as_they_are():
            step = schedule.step if train else schedule.eval
            step(*inputs, microbatch=numbers, target=numbers, return_outputs=False)
        for stage in stages:  # torch's would keep an evaluation's hidden states to the next one
            stage.clear_runtime_states()
        return sum(self.losses, start=zero) + sum((part.router_total for part in parts), start=zero)

    def _loss(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        self.losses.append(loss.detach().clone())  # torch detaches the stage's output in place.
        return loss * self.loss_scale

    def _schedule(
        self, parts: Sequence[Part], num_microbatches: int, hidden: torch.Tensor
    ) -> tuple[Any, list[ScheduledStage]]:
        from torch.distributed import pipelining

        from shardwise.parallel.pipeline_stage import ScheduledStage

        # UserError if there are too few micro-batches.
        pipeline = replace(self.pipeline, num_microbatches=num_microbatches)
        last = pipeline.num_chunks - 1
        stages = []
        for chunk, part in zip(self.chunks, parts, strict=True):
            # The first stage reads the number of a micro-batch, and the last returns a loss.
            below = torch.empty(1, dtype=torch.int64)
            above = torch.empty((), requires_grad=self.lowest <= last)
            if chunk > 0:
                below = self._like(hidden, chunk - 1)
            if chunk < last:
                above = self._like(hidden, chunk)
            place = chunk, pipeline.num_chunks, below, above, self.group, self.clock
            is_batched = pipeline.schedule in BATCHING
            stages.append(ScheduledStage(part, *place, is_batched=is_batched))
        has_one_stage = pipeline.schedule in ONE_STAGE
        schedule: Any = getattr(pipelining, SCHEDULES[pipeline.schedule])(
            stages[0] if has_one_stage else stages,
            num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        return schedule, stages

    def _like(self, hidden: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a tensor like hidden states on meta, which chunk `chunk` passes on."""
        return torch.empty_like(hidden, requires_grad=self.lowest <= chunk)

    def events(self) -> Sequence[Event]:
        """Return what this rank did in the latest training step, in seconds from its start."""
        rank, at = self.mesh.rank("pp"), self.clock.seconds
        return [
            Event(rank, stage.stage_index, microbatch, kind, at(start), at(end))
            for stage in self.latest
            for kind, microbatch, start, end in stage.moments
        ]

    def next_token(self, pm: ParallelModel, row: Batch) -> int:
        """Run one stage after the other on a row [1, T] and return the most likely next token."""
        number = torch.zeros(1, dtype=torch.int64)
        states = number
        hidden = next(p.passed_on(row) for p in pm.parts if isinstance(p, Part))
        token = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for chunk in range(self.pipeline.num_chunks):
            owner = self.pipeline.rank_of(chunk)
            last = chunk == self.pipeline.num_chunks - 1
            if chunk in self.chunks:
                part = pm.parts[self.chunks.index(chunk)]
                assert isinstance(part, Part)
                part.microbatches = [row]
                states = part(states, number, return_logits=True)  # [1, T, D], at last [1, T, V]
                if last:
                    token = states[0, -1].argmax()
            else:
                states = torch.empty_like(hidden, device=self.mesh.device)
            # The states, or in the end the token, go from the chunk's rank to all of the pipeline.
            dist.broadcast(token if last else states, group=self.group, group_src=owner)
        return int(token)


def _tie(pm: ParallelModel, mesh: Mesh, spec: ModelSpec) -> ParallelModel:
    """Keep the tied weight equal on the first and the last stage: its two gradients are added up.

    ZeRO has reduced them to shards before. In a V the stages of one rank share the parameter.
    """
    ends = (0, mesh.size("pp") - 1)
    rank = mesh.rank("pp")
    if rank not in ends:
        return pm
    name, group = f"{spec.embed}.weight", mesh.group("pp")
    other = dist.get_global_rank(group, sum(ends) - rank)

    def add_up() -> None:
        (gradient,) = (pm.shards.get(n, p).grad for n, p in pm.named_parameters() if n == name)
        assert gradient is not None
        sent = local(gradient).to(mesh.device)
        received = torch.empty_like(sent)
        # The gradient of [V, D], or of this rank's shard of it, goes between the first and the last
        # stage both ways.
        transfers = [
            dist.P2POp(dist.isend, sent, other, group),
            dist.P2POp(dist.irecv, received, other, group),
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        local(gradient).add_(received.to(gradient.device))

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if rank:
            for other_name, parameter in named:
                if other_name == name:  # The first stage has it too, and counts it.
                    parameter = pm.shards.get(name, parameter)
                    known = pm.parameter_facts.get(parameter, ParameterFacts())
                    pm.parameter_facts[parameter] = replace(known, is_copy=True)
        return pm.make_optimizer(named)

    return replace(pm, reduce_grads=(*pm.reduce_grads, add_up), make_optimizer=make_optimizer)
