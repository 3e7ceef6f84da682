"""In what order strategies are applied, and which compositions are proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.families import FAMILIES
from shardwise.models.spec import ModelSpec
from shardwise.parallel import accumulate, activation_checkpoint, ddp, fsdp2

Load = Callable[[ParallelModel], None]

ORDER: tuple[tuple[str, Any], ...] = (
    ("activation checkpointing", activation_checkpoint.apply),  # inside the wrappers, so that their hooks lie outside
    ("fsdp2", fsdp2.apply),  # shards a model on meta: no rank ever holds it whole
    ("load", None),  # weights go into whatever each rank holds now
    ("ddp", ddp.apply),  # wraps real weights
    ("float32 accumulation", accumulate.apply),  # changes what the wrappers hand over, and to whom
)

COMPATIBLE: dict[str, frozenset[str]] = {family: frozenset({"single", "ddp", "fsdp2", "hsdp"}) for family in FAMILIES}
"""Per family, the layouts that tests/parity proves; anything else is refused before memory is taken."""
UNPROVEN = frozenset({"single", "ddp", "fsdp2", "hsdp"})
"""The layouts of a family that is not listed: those that ask nothing of a model's inside."""


def layout(cfg: RunConfig) -> str:
    """The name of a run's layout, as COMPATIBLE has it."""
    return "hsdp" if cfg.parallel.dp_replicate > 1 else cfg.parallel.data


def check(cfg: RunConfig, family: str) -> None:
    """Refuse a composition that is not proven for a family, or is not offered for one that is not listed."""
    offered = COMPATIBLE.get(family, UNPROVEN)
    if layout(cfg) not in offered:
        raise UserError(f"{layout(cfg)} is not proven for {family}; use one of {', '.join(sorted(offered))}")


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec, load: Load) -> ParallelModel:
    """Apply every strategy that the run asks for, in ORDER."""
    asked = {"activation checkpointing", "load", cfg.parallel.data}
    if cfg.training.accumulation == "float32":
        asked.add("float32 accumulation")
    for name, strategy in ORDER:
        if name == "load":
            load(pm)
        elif name in asked:
            pm = strategy(pm, mesh, cfg, spec)
    return pm
