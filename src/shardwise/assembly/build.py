"""The one way to make a run: from a config and a state to a model, an optimizer and a schedule.

The model is laid out as `cfg.parallel` says; this rank builds its part of it.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.assembly import order
from shardwise.assembly.costs import Costs, choose_split
from shardwise.assembly.describe import Describe, Description, describe
from shardwise.assembly.loss_scale import LossScale
from shardwise.assembly.optimizer import (
    decayed,
    lr_phases,
    make_lr_schedule,
    make_optimizer,
    optimized_parameters,
)
from shardwise.assembly.recomputation import Chosen
from shardwise.assembly.routing import Routing
from shardwise.assembly.state import FRESH, load_initial_weights, load_state
from shardwise.assembly.step_time import check_step_time
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, ParallelModel, State
from shardwise.base.layouts import strategy_facts
from shardwise.base.schedule.costs import Cost, CostSource
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import Split
from shardwise.config import Optimizer, RunConfig
from shardwise.models import tensor_plan
from shardwise.models.adapters import peft_config
from shardwise.models.counts import ModelCounts
from shardwise.models.load import untuned
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.place import fill, materialise
from shardwise.parallel.reduce import from_every_rank


@dataclass(frozen=True)
class StageSplit:
    """Where a pipeline's model is cut, and by which costs; the same on every rank."""

    pipeline: Pipeline
    split: Split
    units: tuple[Cost, ...]
    """The costs of the units that the split distributes over the stages."""
    source: CostSource

    def __str__(self) -> str:
        pipeline = self.pipeline
        lines = [
            f"pipeline: {pipeline.schedule}, {pipeline.num_microbatches} micro-batches, "
            f"cut by {self.source}; predicted bubble {self.split.timeline.bubble():.1%}"
        ]
        for rank in range(pipeline.num_ranks):
            chunks = [", ".join(self.split.contents(c)) for c in pipeline.chunks_of(rank)]
            lines.append(f"  rank {rank}: {' | '.join(chunks)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Job:
    """A run that is ready to train."""

    pm: ParallelModel
    cfg: RunConfig
    """The run as it was built, with the layers that a budget of memory has chosen."""
    run: Description
    """The whole model and the facts of the run; weights are on meta where it is cut into stages."""
    optimizer: torch.optim.Optimizer
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    num_steps: int
    """How many optimizer steps the run has."""
    parameters: Mapping[str, int]
    """Number of parameters of the whole model: `trainable`, `frozen` and in `total`."""
    counts: ModelCounts | None
    """The counts of the whole model; None where FLOPs cannot be counted, as a note explains."""
    loss_scale: LossScale
    cut: StageSplit | None
    """Where a pipeline is cut into stages; None without one."""
    routing: Routing | None
    """Counters of tokens by expert; None in a model without routed experts."""
    chosen: Chosen | None
    """Choice of what is computed again, where the run has a budget of memory."""
    notes: tuple[str, ...]
    """Notes for a reader of the result; printed, and kept in the record."""
    build_seconds: float
    """The seconds that building it took on this rank."""
    rebuild: "Callable[[RunConfig, State], Job]"
    """Builds the same run of a transformers model again, under another layout, from a state that
    has all tensors. A module of the caller may share its layers with the stages of this job."""

    def trainable(self) -> list[nn.Parameter]:
        """Return what the optimizer updates on this rank: parameters, or shards of them."""
        return [parameter for _, parameter in optimized_parameters(self.optimizer)]


def build(
    cfg: RunConfig,
    mesh: Mesh,
    state: State = FRESH,
    num_steps: int | None = None,
    chosen: Chosen | None = None,
    describe: Describe = describe,
) -> Job:
    """Build this rank's part of the run that `cfg` describes, as it is after `state.step` steps.

    The run has `num_steps` steps; without this number, which comes from the data if
    `training.epochs` is set, `training.steps`, or the one step that a check or a measure takes.
    `chosen`: what a budget of memory has chosen, where the run has one. `describe`: what describes
    the run of a module of the caller, in place of the model that `cfg` names. Memory is taken after
    all checks; UserError, the same on every rank, if one fails.
    """
    begin = time.perf_counter()
    cfg = peft_config.resumed(cfg, state.lora)
    if chosen is not None:
        cfg = chosen.applied(cfg)
    num_steps = num_steps or cfg.training.num_steps or 1
    num_ranks = mesh.dense.size()
    run = describe(cfg, num_ranks, mesh.device)
    assert cfg.training.budget_bytes is None, "a budget chooses before a run is built"
    hf, spec = run.hf, run.spec
    selected = update_rule_of(cfg).selected(hf, spec)
    state.check(hf, cfg, selected)
    parameters = _sizes(hf)
    counts = run.counts()
    if counts is not None:
        check_step_time(cfg, counts, num_ranks, mesh.device)
    if cfg.data.keeps_documents_apart:  # attention's FLOPs depend on where documents end
        counts = None
    cut = None
    if run.pipeline is not None:
        cut = _cut(cfg, run.pipeline, run.costs(cfg, counts, num_ranks))
    notes = (*_notes(cfg, mesh, run, cut), *_short_warmup(cfg.optimizer, num_steps))
    # By the model on meta: what the strategies make of its weights has other sizes.
    decays = decayed(hf, spec)
    routing = run.routing(cfg, mesh.device)

    boundaries = () if cut is None else cut.split.boundaries
    chunks = () if cut is None else cut.pipeline.chunks_of(mesh.dense.get_local_rank("pp"))
    pm = lay_out(
        run,
        cfg,
        mesh,
        state,
        lambda named: make_optimizer(
            cfg.optimizer, named, decays, selected, cfg.training.precision
        ),
        boundaries,
        chunks,
    )
    notes += _untuned(cfg, run)  # now the files are on this machine
    optimizer = pm.make_optimizer([(n, p) for n, p in pm.named_parameters() if p.requires_grad])
    load_state(pm, optimizer, cfg, state)
    loss_scale = LossScale.of(cfg.training.precision)
    if state.loss_scale is not None:
        loss_scale.load_state_dict(state.loss_scale)
    return Job(
        pm=pm,
        cfg=cfg,
        run=run,
        optimizer=optimizer,
        lr_schedule=make_lr_schedule(cfg.optimizer, optimizer, num_steps, state.step),
        num_steps=num_steps,
        parameters=parameters,
        counts=counts,
        loss_scale=loss_scale,
        cut=cut,
        routing=routing,
        chosen=chosen,
        notes=notes,
        build_seconds=time.perf_counter() - begin,
        rebuild=lambda cfg, state: build(cfg, mesh, state, num_steps, chosen, describe),
    )


def lay_out(
    run: Description,
    cfg: RunConfig,
    mesh: Mesh,
    state: State,
    make_optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    boundaries: Sequence[int] = (),
    chunks: Sequence[int] = (),
) -> ParallelModel:
    """Return this rank's parts of a model, laid out as `cfg` says, with the weights that `state`
    does not have. `boundaries` and `chunks`: those of a pipeline's stages.
    """

    def load(pm: ParallelModel) -> None:
        materialise(nn.ModuleList(pm.parts), mesh.device)
        # A reference to start from has the values of the files, whatever the state has.
        load_initial_weights(pm, cfg, FRESH if cfg.keeps_start else state)

    pm = ParallelModel(
        run.parts(cfg, boundaries, chunks),
        run_in_turn,
        make_optimizer,
        from_portable=lambda name, held, portable: fill(held, portable),
    )
    return order.apply(pm, mesh, cfg, run.spec, load)


def _cut(cfg: RunConfig, pipeline: Pipeline, costs: Costs) -> StageSplit:
    # A few numbers per layer go from every rank to all: a node may have another profile, or none.
    units, source = from_every_rank(costs)[0]
    return StageSplit(pipeline, choose_split(cfg, units, pipeline.num_microbatches), units, source)


def _notes(cfg: RunConfig, mesh: Mesh, run: Description, cut: StageSplit | None) -> tuple[str, ...]:
    notes = [*run.uncounted(cfg)]
    if cfg.model.expert_capacity is not None:
        notes.append(
            "model.expert_capacity: FLOPs (mfu and hfu) are counted as if no token were dropped; "
            "routing.dropped is the share that was"
        )
    if run.lora is not None and run.lora.dora:
        notes.append(
            "lora.dora: FLOPs (mfu and hfu) are counted without the product B A of each matrix, "
            "which a forward makes to take the lengths of rows"
        )
    if cfg.parallel.tp > 1:
        units = tensor_plan.replicated_weights(run.hf, run.spec, cfg.parallel.tp)
        if any(units):
            notes.append(_replicated_note(units, cut, cfg, mesh))
    return (*notes, *run.notes)


def _untuned(cfg: RunConfig, run: Description) -> tuple[str, ...]:
    """Return a note of what the base's files have beside the model that is trained."""
    if run.spec.is_own or (text := untuned(run.hf, cfg.model)) is None:
        return ()
    result = "the adapter leaves them" if cfg.lora else "model/ gets them"
    return (f"model.path: {text} are not tuned with it; {result} as they are in the base",)


def _short_warmup(cfg: Optimizer, num_steps: int) -> tuple[str, ...]:
    """Return a note where the run ends before its learning rate has risen."""
    warmup, _ = lr_phases(cfg, num_steps)
    if warmup <= num_steps:
        return ()
    return (
        f"optimizer.warmup_steps is {warmup}, and the run has {num_steps}: the learning rate "
        f"reaches {num_steps / warmup:.0%} of optimizer.lr",
    )


def _replicated_note(
    units: Sequence[Counter[str]], cut: StageSplit | None, cfg: RunConfig, mesh: Mesh
) -> str:
    """Name the weights of the whole model that tensor parallelism does not shard."""
    num_bytes = sum(units, Counter())
    listed = ", ".join(f"{name} ({n:,})" for name, n in num_bytes.items())
    note = (
        f"parallel.tp: of these weights other ranks hold the same bytes: {listed}; "
        f"{num_bytes.total():,} in the whole model"
    )
    if cut is not None:
        largest = max(_bytes_on_rank(rank, units, cut) for rank in range(cut.pipeline.num_ranks))
        note += f", on a rank of the pipeline at most {largest:,}"
    if "weights" in strategy_facts(cfg.parallel).sharded and mesh.size("dp_shard") > 1:
        note += f", of which {cfg.parallel.data} leaves 1/{mesh.size('dp_shard')} on each rank"
    return note


def _bytes_on_rank(rank: int, units: Sequence[Counter[str]], cut: StageSplit) -> int:
    edges = cut.split.boundaries
    return sum(
        units[unit].total()
        for chunk in cut.pipeline.chunks_of(rank)
        for unit in range(edges[chunk], edges[chunk + 1])
    )


def _sizes(hf: nn.Module) -> dict[str, int]:
    total = sum(p.numel() for p in hf.parameters())
    trainable = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    return {"trainable": trainable, "frozen": total - trainable, "total": total}


def run_in_turn(
    pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
) -> torch.Tensor:
    """Run one micro-batch after the other through a model that is not cut: see `Run`."""
    (part,) = pm.parts
    part.train(train)
    total = torch.zeros((), device=microbatches[0].device)
    with torch.set_grad_enabled(train):
        for i, batch in enumerate(microbatches):
            pm.set_sync(i == len(microbatches) - 1)
            for shard in pm.shard_batch:
                batch = shard(batch)
            loss = part(batch)
            if train:
                (loss * loss_scale).backward()
            total += loss.detach()
    return total
