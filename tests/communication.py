"""What one training step sends: every collective that is called, with its group and its bytes.

Counted is what a call is given, not what a backend makes of it (gloo's reduce-scatter is an all-reduce inside).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.assembly.build import Job, build
from shardwise.interfaces import Batch, Mesh
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.lora import inject
from shardwise.models.spec import ModelSpec
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import axes_of
from shardwise.training.step import training_step
from tests.communication_formulas import Facts, Sent, Total, Unit, add_up
from tests.parity.harness import Cell, microbatches, run_config

# Operator: (what it does, which argument is the whole that is reduced, gathered or sent).
_KINDS = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "send": ("send", 0),
}
_FREE = {"recv_", "barrier", "monitored_barrier_"}  # a send's other end, and what carries nothing


class Collectives(TorchDispatchMode):
    """Counts the collectives of a `with` block on this rank.

    (torch's CommDebugMode puts hooks on modules, with which pipelines' halved backwards do not run.)
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        used = [axis for axis in mesh.AXES if mesh.size(axis) > 1]
        self.axes = {
            tuple(dist.get_process_group_ranks(mesh.dense.get_group(axis))): axis for axis in used
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in _FREE:
            kind, place = _KINDS[name]
            group = next(
                a
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            axis = self.axes[tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))]
            self.sent.append(
                Sent(kind, axis, 1, sum(tensor.nbytes for tensor in tree_leaves(args[place])))
            )
        assert func.namespace != "_c10d_functional", f"{func} is not counted"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """One rank's third step."""

    facts: Facts
    sent: Total


def count(cell: Cell) -> Counted:
    """Count a step of this rank; the process group must be up."""
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    for step in (
        1,
        2,
    ):  # in the first ones ddp agrees upon its buckets, and pipelines make their stages ready
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
    batches = microbatches(cfg, mesh, 3)
    with Collectives(mesh) as collectives:
        training_step(job, batches, mesh, 1.0)
    return Counted(_facts(cell, job, mesh, batches), add_up(collectives.sent))


def _facts(cell: Cell, job: Job, mesh: Mesh, batches: Sequence[Batch]) -> Facts:
    specs = [part.spec for part in job.pm.parts if isinstance(part, CausalLM)]
    named = dict(job.pm.named_parameters())
    sizes = {axis: mesh.size(axis) for axis in mesh.AXES}
    blocks = [
        f"{layer.name}.{path}."
        for part in job.pm.parts
        if isinstance(part, CausalLM)
        for layer in part.spec.layers
        for path in FAMILIES[cell.family].paths
        if any(name.startswith(f"{layer.name}.{path}.") for name in named)
    ]
    cut = {
        name: dim for name, parameter in named.items() if (dim := _tp_dim(parameter)) is not None
    }
    whole = _shapes(cell)
    shapes = {name: [*whole[name]] for name in named}
    for name, dim in cut.items():  # rows that several ranks hold are there more than once
        shapes[name][dim] = named[name].shape[dim] // sizes["tp"]
    trained = frozenset(name for name, parameter in named.items() if parameter.requires_grad)
    first, last = any(spec.first for spec in specs), any(spec.last for spec in specs)
    tied = frozenset(
        [f"{job.spec.embed}.weight"]
        if job.spec.tied and first != last and cell.mode == "full"
        else []
    )
    return Facts(
        cell=cell,
        sizes=sizes,
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        trained=trained,
        cut=cut,
        units=tuple(_units(specs, frozenset(named))),
        tied=tied,
        num_microbatches=len(batches),
        num_targets=sum(batch.num_target_tokens() for batch in batches),
        hidden_bytes=4 * batches[0].input_ids.numel() * job.spec.hidden_size,
        num_tokens=batches[0].input_ids.numel(),
        num_blocks=len(blocks),
        num_mixers=len(job.spec.layers[0].mixers),
        in_blocks=frozenset(name for name in named if name.startswith(tuple(blocks))),
        shared_bytes=tuple(
            _shared(
                {name: whole[name] for name in trained & cut.keys()}, job.hf.config, sizes["tp"]
            )
        ),
        first=first,
        last=last,
    )


def _shapes(cell: Cell) -> dict[str, torch.Size]:
    """Of the model's parameters on one process."""
    cfg = run_config(cell)
    config = read_config(cfg.model)
    hf = build_meta(cfg.model, config)
    if cfg.lora is not None:
        inject(hf, cfg.lora, spec_of(config, hf))
    return {name: parameter.shape for name, parameter in hf.named_parameters()}


def _shared(shapes: dict[str, torch.Size], config: Any, tp: int) -> Iterator[int]:
    """Bytes of each whole part of these parameters that several ranks hold."""
    for name, shape in shapes.items():
        path = name.split(".")
        if {"k_proj", "v_proj"} & set(path) and config.num_key_value_heads < tp:
            yield 4 * prod(shape)
        if (
            "mamba" in path
            and {"in_proj", "conv1d"} & set(path)
            and getattr(config, "mamba_n_groups", tp) < tp
        ):
            yield from 2 * [
                4 * config.mamba_n_groups * config.mamba_d_state * prod(shape[1:])
            ]  # B and C


def _units(specs: Sequence[ModelSpec], names: frozenset[str]) -> Iterator[Unit]:
    """A tied embedding is used at both ends, and stays with norm and head."""
    (spec,) = specs  # one stage a rank
    inner = [*([] if spec.tied else [spec.embed]), *(layer.name for layer in spec.layers)]
    left = names
    for path in inner:
        if unit := frozenset(name for name in left if name.startswith(f"{path}.")):
            yield Unit(unit)
            left -= unit
    if left:
        yield Unit(left, kept=True)


def _tp_dim(parameter: torch.Tensor) -> int | None:
    """Along which dim a parameter is dealt out; none if every rank has it whole."""
    if not isinstance(parameter, DTensor):
        return None
    return next(
        (
            p.dim
            for a, p in zip(axes_of(parameter), parameter.placements)
            if a == "tp" and p.is_shard()
        ),
        None,
    )
