"""The order in which strategies are applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.spec import ModelSpec
from shardwise.parallel import (
    accumulate,
    activation_checkpoint,
    compile,
    ddp,
    fsdp1,
    fsdp2,
    merged,
    offload,
    pipeline_parallel,
    tensor_parallel,
    zero,
)

Load = Callable[[ParallelModel], None]

ORDER: tuple[tuple[str, Any], ...] = (
    ("tensor", tensor_parallel.apply),  # cuts the weights that all others then wrap
    ("compile", compile.apply),  # inside checkpointing, which runs compiled layers again
    ("activation checkpointing", activation_checkpoint.apply),  # inside the wrappers, so that their hooks lie outside
    ("fsdp1", fsdp1.apply),  # gives memory to one unit of a model on meta after the other, and shards it
    ("fsdp2", fsdp2.apply),  # shards a model on meta: no rank ever holds it whole
    ("load", None),  # weights go into whatever each rank holds now
    ("offload", offload.apply),  # copies real shards
    ("ddp", ddp.apply),  # wraps real weights
    ("zero1", zero.apply),  # the optimizer's shards are views into real weights
    ("zero2", zero.apply),
    ("merged adapters", merged.apply),  # from real weights; around whatever runs a step
    ("float32 accumulation", accumulate.apply),  # changes what the wrappers hand over, and to whom
    ("pipeline", pipeline_parallel.apply),  # runs the stages that all others have made ready
)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec, load: Load) -> ParallelModel:
    """Apply every strategy that the run asks for, in ORDER."""
    asked = {"activation checkpointing", "load", cfg.parallel.data}
    if cfg.parallel.offload != "none":
        asked.add("offload")
    if cfg.training.compile != "none":
        asked.add("compile")
    if cfg.training.accumulation == "float32":
        asked.add("float32 accumulation")
    if cfg.lora and cfg.lora.merged:
        asked.add("merged adapters")
    if cfg.parallel.tp > 1:
        asked.add("tensor")
    if cfg.parallel.pp > 1:
        asked.add("pipeline")
    for name, strategy in ORDER:
        if name == "load":
            load(pm)
        elif name in asked:
            pm = strategy(pm, mesh, cfg, spec)
    return pm
