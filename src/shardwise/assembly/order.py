"""The one order in which everything is done to a model between `meta` and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.patches import PATCHES, Patch
from shardwise.models.spec import ModelSpec
from shardwise.parallel import (
    accumulate,
    activation_checkpoint,
    compile,
    ddp,
    fsdp1,
    fsdp2,
    offload,
    pipeline_parallel,
    tensor_parallel,
    zero,
)

Apply = Callable[[ParallelModel, Mesh, RunConfig, ModelSpec], ParallelModel]
Load = Callable[[ParallelModel], None]


class Entry(NamedTuple):
    """Something that is done to a model."""

    name: str
    is_requested: Callable[[RunConfig], bool]
    apply: Apply


def _patched(patch: Patch) -> Apply:
    def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
        for part in pm.parts:
            if isinstance(part, CausalLM):  # a module of the caller has nothing of transformers
                patch(part, cfg, mesh.device)
        return pm

    return apply


def _data(*names: str) -> Callable[[RunConfig], bool]:
    return lambda cfg: cfg.parallel.data in names


BEFORE_LOADING = (
    # What replaces forwards comes first: the strategies wrap or shard what it has left.
    *(Entry(name, lambda cfg: True, _patched(patch)) for name, patch in PATCHES),
    # Shards the weights that all others then wrap.
    Entry("tensor", lambda cfg: cfg.parallel.tp > 1, tensor_parallel.apply),
    # Inside checkpointing, which runs compiled layers again.
    Entry("compile", lambda cfg: cfg.training.compile != "none", compile.apply),
    # Inside the wrappers, so that their hooks lie outside.
    Entry(
        "activation checkpointing",
        lambda cfg: cfg.training.checkpointing != "none",
        activation_checkpoint.apply,
    ),
    # Gives memory to one unit of a model on meta after the other, and shards it.
    Entry("fsdp1", _data("fsdp1"), fsdp1.apply),
    # Shards a model on meta, so that no rank ever holds all of it.
    Entry("fsdp2", _data("fsdp2"), fsdp2.apply),
)
AFTER_LOADING = (
    # Copies real shards.
    Entry("offload", lambda cfg: cfg.parallel.offload != "none", offload.apply),
    # Wraps real weights.
    Entry("ddp", _data("ddp"), ddp.apply),
    # The optimizer's shards are views into real weights.
    Entry("zero", _data("zero1", "zero2"), zero.apply),
    # Changes which gradients the wrappers give to the optimizer.
    Entry(
        "float32 accumulation", lambda cfg: cfg.training.accumulation == "float32", accumulate.apply
    ),
    # Runs the stages that all others have prepared.
    Entry("pipeline", lambda cfg: cfg.parallel.pp > 1, pipeline_parallel.apply),
)
ORDER = (*BEFORE_LOADING, *AFTER_LOADING)
"""Weights are loaded, into what each rank holds, between the two."""


def apply(
    pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec, load: Load
) -> ParallelModel:
    """Do to a model on `meta` everything that the run requests, in ORDER, and load its weights."""
    pm = _apply_each(BEFORE_LOADING, pm, mesh, cfg, spec)
    load(pm)
    return _apply_each(AFTER_LOADING, pm, mesh, cfg, spec)


def _apply_each(
    entries: Sequence[Entry], pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
) -> ParallelModel:
    for entry in entries:
        if entry.is_requested(cfg):
            pm = entry.apply(pm, mesh, cfg, spec)
    return pm
