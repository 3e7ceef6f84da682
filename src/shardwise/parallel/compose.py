"""In what order strategies are applied, and which compositions are proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.config import RunConfig, UserError
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.families import FAMILIES
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
from shardwise.schedule.orders import SPLITTING, V_SHAPED

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
    ("float32 accumulation", accumulate.apply),  # changes what the wrappers hand over, and to whom
    ("pipeline", pipeline_parallel.apply),  # runs the stages that all others have made ready
)

_WITHOUT_TENSOR = ("single", "ddp", "zero1", "zero2", "fsdp1", "fsdp2", "hsdp", "pp", "pp-ddp", "pp-fsdp2", "pp-hsdp")
_TENSOR = ("tp", "ddp-tp", "zero1-tp", "fsdp2-tp", "hsdp-tp", "pp-tp", "pp-ddp-tp", "pp-fsdp2-tp", "pp-hsdp-tp")
WITH_TENSOR = (*_TENSOR, *(f"{layout}-sp" for layout in _TENSOR))
"""`sp`: with sequence parallelism."""
LAYOUTS = (*_WITHOUT_TENSOR, *WITH_TENSOR)
COMPATIBLE: dict[str, frozenset[str]] = {family: frozenset(LAYOUTS) for family in FAMILIES}
"""Per proven family, the layouts that tests/parity proves; others are refused before memory is taken."""
REFUSED: dict[str, str] = {
    "fsdp1-tp": "fsdp1's flat parameters hold no DTensors; use fsdp2",
    "zero2-tp": "zero2 reduces gradients before those that tensor parallelism adds up are whole; use zero1 or fsdp2",
    "pp-zero1": "not proven in a pipeline; use ddp or fsdp2",
    "pp-zero2": "not proven in a pipeline; use ddp or fsdp2",
    "pp-fsdp1": "not proven in a pipeline; use ddp or fsdp2",
}
"""Why a layout is not offered, with what else would do."""
UNPROVEN = frozenset(layout for layout in _WITHOUT_TENSOR if not layout.startswith("pp"))
"""The layouts of a family that is not listed: those that ask nothing of a model's inside."""


def layout(cfg: RunConfig) -> str:
    """The name of a run's layout, as COMPATIBLE has it."""
    parallel = cfg.parallel
    data = "hsdp" if parallel.dp_replicate > 1 else parallel.data
    used = {"pp": parallel.pp > 1, data: data != "single", "tp": parallel.tp > 1, "sp": parallel.sequence_parallel}
    return "-".join(name for name, is_used in used.items() if is_used) or "single"


def proofs(family: str) -> dict[str, str]:
    """By layout that a family may run under, the two cells of tests/parity that prove it: with LoRA, and in full.

    Named as a shell's braces write it. On 2 ranks of each axis, of which hsdp is two, but one in a pipeline. Empty for
    `single`, which is what others are compared with, and for a family that is not listed.
    """
    found = dict.fromkeys((layout for layout in LAYOUTS if layout in COMPATIBLE.get(family, UNPROVEN)), "")
    for layout in found:
        axes = layout.removesuffix("-sp").split("-")
        num_ranks = 2 ** (len(axes) + (axes[0] == "hsdp"))
        if family in COMPATIBLE and layout != "single":
            found[layout] = f"{family}-{layout}{'-1f1b' * ('pp' in axes)}-{{lora,full}}-{num_ranks}p"
    return found


def check(cfg: RunConfig, family: str) -> None:
    """Refuse a composition that is not proven for a family, or is not offered for one that is not listed."""
    offered = COMPATIBLE.get(family, UNPROVEN)
    if (asked := layout(cfg)) not in offered:
        name = asked.removesuffix("-sp")
        if why := REFUSED.get(name) or REFUSED.get(name.removesuffix("-tp")):
            raise UserError(f"{asked} is not offered: {why}")
        raise UserError(f"{asked} is not proven for {family}; use one of {', '.join(sorted(offered))}")
    if cfg.parallel.tp > 1:
        _check_tensor(cfg)
    if cfg.parallel.pp > 1:
        _check_pipeline(cfg)


def _check_tensor(cfg: RunConfig) -> None:
    """Refuse what does not know of weights that are cut within a layer, or is not proven with them."""
    parallel = cfg.parallel
    for key, value in (("parallel.offload", parallel.offload), ("training.compile", cfg.training.compile)):
        if value != "none":
            raise UserError(
                f"{key} is {value}, which is not proven with tensor parallelism; set it to none, or parallel.tp to 1"
            )
    if cfg.training.precision == "float16":
        raise UserError(
            "training.precision is float16, which is not proven with tensor parallelism; use bfloat16, or set "
            "parallel.tp to 1"
        )
    if parallel.memory_limit_gib is not None:
        raise UserError(
            "parallel.memory_limit_gib counts whole layers, not a tensor-parallel rank's share; leave it out, or set "
            "parallel.tp to 1"
        )
    if parallel.sequence_parallel and cfg.data.sequence_length % parallel.tp:
        below = cfg.data.sequence_length // parallel.tp * parallel.tp
        raise UserError(
            f"data.sequence_length is {cfg.data.sequence_length}, which parallel.sequence_parallel cannot deal out to "
            f"{parallel.tp} ranks; use {f'{below} or ' * (below > 0)}{below + parallel.tp}, or set "
            "parallel.sequence_parallel to false"
        )


def _check_pipeline(cfg: RunConfig) -> None:
    """Refuse what is silently wrong in torch's schedules, or not proven in them; each has a test that says so."""
    parallel = cfg.parallel
    if torch.__version__ < "2.13":
        raise UserError(f"parallel.pp needs torch 2.13 or later, and this is {torch.__version__}; install that")
    if parallel.offload != "none":
        raise UserError("parallel.offload is not proven in a pipeline; leave it at none, or parallel.pp at 1")
    if parallel.schedule not in SPLITTING:
        return
    instead = "use 1f1b, interleaved-1f1b, looped-bfs or gpipe"
    if parallel.data == "fsdp2" and parallel.reshard_after_forward:
        raise UserError(
            f"{parallel.schedule} halves backwards, and torch loses gradients of weights that fsdp2 frees in between; "
            f"set parallel.reshard_after_forward to false, or {instead}"
        )
    if cfg.training.checkpointing != "none":
        raise UserError(
            f"{parallel.schedule} halves backwards, and torch recomputes a layer in the first half and then again for "
            f"every weight of it; set training.checkpointing to none, or {instead}"
        )
    if cfg.training.compile != "none":
        raise UserError(
            f"{parallel.schedule} halves backwards, which compiled code cannot; set training.compile to none, "
            f"or {instead}"
        )


def check_tied(cfg: RunConfig, spec: ModelSpec) -> None:
    """Refuse stages that would have to share a parameter and cannot."""
    if spec.tied and cfg.parallel.schedule in V_SHAPED and cfg.parallel.data == "fsdp2":
        raise UserError(
            f"{cfg.parallel.schedule} has the embedding and the head on one rank, where they share their tied weight, "
            "and two stages that fsdp2 shards cannot share one; use interleaved-zero-bubble or 1f1b, or ddp"
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
