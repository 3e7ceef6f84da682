"""The one way to make a run: a model as its layout has it, an optimizer and a schedule, from a config and a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.assembly import order
from shardwise.assembly.costs import choose_split, costs_of, memory_caveat
from shardwise.assembly.describe import Description, describe
from shardwise.assembly.loss_scale import LossScale
from shardwise.assembly.optimizer import is_decayed, make_lr_schedule, make_optimizer
from shardwise.config import RunConfig
from shardwise.interfaces import Batch, Mesh, ParallelModel, Part
from shardwise.models import load, lora, tensor_plan
from shardwise.models.causal_lm import CausalLM
from shardwise.models.counts import ModelCounts, count_model
from shardwise.models.families import FAMILIES, unproven_note
from shardwise.models.initialise import nudged
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.spec import ModelSpec
from shardwise.models.stage import stages
from shardwise.parallel.place import fill, materialise
from shardwise.parallel.reduce import of_every_rank
from shardwise.process.watchdog import beat, paused
from shardwise.schedule.costs import Cost, CostSource
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Split


@dataclass(frozen=True)
class State:
    """What a run starts from beside its config."""

    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Full tensors by parameter name, in place of the initial values."""
    step: int = 0
    """Steps done before; the learning rate is a function of it."""


@dataclass(frozen=True)
class Cut:
    """Where a pipeline's model is cut, and what that goes by; the same on every rank."""

    pipeline: Pipeline
    split: Split
    units: tuple[Cost, ...]  # what the split is of
    source: CostSource

    def __str__(self) -> str:
        pipeline, split = self.pipeline, self.split
        ranks = [
            [", ".join(split.contents(c)) for c in pipeline.chunks_of(r)]
            for r in range(pipeline.num_ranks)
        ]
        head = (
            f"pipeline: {pipeline.schedule}, {pipeline.num_microbatches} micro-batches, cut by {self.source}; "
            f"predicted bubble {split.timeline.bubble():.1%}"
        )
        return "\n".join(
            [head, *(f"  rank {rank}: {' | '.join(chunks)}" for rank, chunks in enumerate(ranks))]
        )


@dataclass(frozen=True)
class Job:
    """A run that is ready to train."""

    pm: ParallelModel
    hf: PreTrainedModel
    """The whole model by names and config; on meta where it is cut into stages."""
    optimizer: torch.optim.Optimizer
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    spec: ModelSpec
    parameters: Mapping[
        str, int
    ]  # of the whole model: how many are trainable, frozen, and in total
    trained: frozenset[str]  # names of the trainable ones, of the whole model
    counts: (
        ModelCounts | None
    )  # of the whole model; None where FLOPs cannot be counted, as a note says
    coverage: lora.Coverage | None
    loss_scale: LossScale
    positions: int | None  # how many the model has learned; None: it takes any
    cut: Cut | None = None  # of a pipeline
    kernels: Mapping[str, str] = field(
        default_factory=dict
    )  # what `lora.kernel` and `training.loss` came to
    notes: tuple[
        str, ...
    ] = ()  # what whoever reads the result must know; printed, and kept in the record

    def trainable(self) -> list[torch.nn.Parameter]:
        """What the optimizer updates on this rank, with its gradients: parameters, or shards of them."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def build(cfg: RunConfig, mesh: Mesh, state: State | None = None) -> Job:
    """Build the part of this rank in the run that `cfg` describes; memory is taken after all checks."""
    state = state or State()
    facts = describe(cfg, mesh.dense.size(), mesh.device)
    hf, spec, family = facts.hf, facts.spec, facts.family
    parameters = _sizes(hf)
    notes = _notes(cfg, spec)
    counts = None if notes else count_model(hf, spec)
    cut = None if facts.pipeline is None else _cut(cfg, mesh, facts, facts.pipeline, counts)
    if cfg.parallel.tp > 1:
        notes += _replicated_note(
            tensor_plan.replicated_weights(hf, spec, cfg.parallel.tp), cut, cfg, mesh
        )
    if cut and cfg.parallel.memory_limit_gib and (caveat := memory_caveat(spec, cut.source)):
        notes += (f"parallel.memory_limit_gib: {caveat}",)
    notes += facts.notes
    trained = frozenset(n for n, p in hf.named_parameters() if p.requires_grad)
    decayed = {n for n, p in hf.named_parameters() if is_decayed(n, p, family)}  # by whole shapes

    def load_parts(pm: ParallelModel) -> None:
        materialise(nn.ModuleList(pm.parts), mesh.device)
        for part in pm.parts:
            _fill_part(pm, part, cfg, state)

    pm = ParallelModel(
        parts=_parts(cfg, mesh, facts, cut),
        run=run_in_turn,
        make_optimizer=lambda named: make_optimizer(cfg.optimizer, named, decayed),
        from_portable=lambda name, held, portable: fill(held, portable),
    )
    pm = order.apply(pm, mesh, cfg, spec, load_parts)
    optimizer = pm.make_optimizer([(n, p) for n, p in pm.named_parameters() if p.requires_grad])
    lr_schedule = make_lr_schedule(cfg.optimizer, optimizer, cfg.training.steps, state.step)
    loss_scale = LossScale.of(cfg.training.precision)
    return Job(
        pm=pm,
        hf=hf,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        spec=spec,
        parameters=parameters,
        trained=trained,
        counts=counts,
        coverage=facts.coverage,
        loss_scale=loss_scale,
        positions=facts.positions,
        cut=cut,
        kernels=facts.kernels,
        notes=notes,
    )


def _cut(
    cfg: RunConfig, mesh: Mesh, facts: Description, pipeline: Pipeline, counts: ModelCounts | None
) -> Cut:
    costs = costs_of(cfg, facts.hf, facts.spec, counts, mesh.dense.size(), mesh.size("dp_shard"))
    # A few numbers per layer, from every rank to all: on another node another profile may lie, or none.
    units, source = of_every_rank(costs)[0]
    return Cut(pipeline, choose_split(cfg, units, pipeline.num_microbatches), units, source)


def _parts(cfg: RunConfig, mesh: Mesh, facts: Description, cut: Cut | None) -> tuple[CausalLM, ...]:
    if cut is None:
        return (CausalLM(facts.hf, facts.spec, facts.family, cfg),)
    chunks = cut.pipeline.chunks_of(mesh.dense.get_local_rank("pp"))
    return stages(facts.hf, facts.spec, cut.split.boundaries, chunks, cfg, facts.family)


def _notes(cfg: RunConfig, spec: ModelSpec) -> tuple[str, ...]:
    """Why FLOPs cannot be counted; empty where they can."""
    notes = () if spec.family in FAMILIES else (unproven_note(spec.family),)
    if cfg.data.keeps_documents_apart:
        notes += (
            "data.packing isolated: no FLOPs are counted (mfu and hfu are null), since attention's depend on where the "
            "documents end",
        )
    return notes


def _replicated_note(
    units: Sequence[Counter[str]], cut: Cut | None, cfg: RunConfig, mesh: Mesh
) -> tuple[str, ...]:
    """Return what tensor parallelism does not shard, if anything, in the whole model: the same on all ranks."""
    whole = sum(units, Counter())
    told = ", ".join(f"{name} ({num_bytes:,})" for name, num_bytes in whole.items())
    said = f"parallel.tp: of these weights other ranks hold the same bytes: {told}; {whole.total():,} in the whole model"
    if cut is not None:
        edges, pipeline = cut.split.boundaries, cut.pipeline
        held = [
            sum(
                units[u].total()
                for c in pipeline.chunks_of(r)
                for u in range(edges[c], edges[c + 1])
            )
            for r in range(pipeline.num_ranks)
        ]
        said += f", on a rank of the pipeline at most {max(held):,}"
    if cfg.parallel.data == "fsdp2" and mesh.size("dp_shard") > 1:
        said += f", of which fsdp2 leaves 1/{mesh.size('dp_shard')} on each rank"
    return (said,) * bool(whole)


def _sizes(hf: torch.nn.Module) -> dict[str, int]:
    total = sum(p.numel() for p in hf.parameters())
    trainable = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    return {"trainable": trainable, "frozen": total - trainable, "total": total}


def run_in_turn(
    pm: ParallelModel, microbatches: Sequence[Batch], loss_scale: float, train: bool
) -> torch.Tensor:
    """One micro-batch after the other through the one part of a model that is not cut into stages."""
    (part,) = pm.parts
    part.train(train)
    total = torch.zeros((), device=microbatches[0].input_ids.device)
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


def _fill_part(pm: ParallelModel, part: Part, cfg: RunConfig, state: State) -> None:
    targets = dict(chain(part.hf.named_parameters(), part.hf.named_buffers()))
    # Two parameters may stand for one weight: `modules_to_save` keeps the original beside the copy that is trained.
    by_hf_name: dict[str, list[str]] = {}
    for name in targets:
        if not is_adapter(name):
            by_hf_name.setdefault(hf_name(name), []).append(name)
    with paused():
        load.fetch(cfg.model)
    base = load.weights(part.hf, cfg.model, cfg.training.seed, by_hf_name)
    initial = chain(
        ((name, full) for disk_name, full in base for name in by_hf_name[disk_name]),
        lora.adapter_weights(part.hf, cfg.training.seed),
        ((name, full) for name, full in state.parameters.items() if name in targets),
    )
    filled = set()
    for name, full in initial:  # one at a time
        if cfg.measure.nudge_weights:
            full = nudged(full, cfg.training.seed, name)
        pm.from_portable(name, targets[name], full)
        filled.add(name)
        beat()
    missed = [name for name, _ in part.hf.named_parameters() if name not in filled]
    assert not missed, f"never filled: {missed}"
