"""What one training step sends: every collective that is called, with its group and its bytes, and closed formulas.

Counted is what a call is given, not what a backend makes of it (gloo's reduce-scatter is an all-reduce inside).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.interfaces import Batch, Mesh
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import axes_of, shard_dim
from shardwise.training.build import Job, build
from shardwise.training.step import training_step
from tests.parity.harness import Cell, microbatches, run_config

# Operator: (what it does, which argument is the whole that is reduced, gathered or sent).
_KINDS = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "send": ("send", 0),
}
_FREE = {"recv_", "barrier", "monitored_barrier_"}  # a send's other end, and what carries nothing

Bytes = Counter[tuple[str, str]]
"""By (what is done, mesh axis): bytes of the whole tensors, or calls."""

WITHIN = {
    "olmo_hybrid": 1 * 2,  # an attention layer, whose q and k are each normalised over all heads: their squares' sums
    "jamba": 2 * (6 + 2 * 8),  # two Mamba layers, where all channels give the time step's factor, B and C
}
"""Numbers per token that blocks of the tiny models add up within themselves, forwards and backwards; others none."""


class Collectives(TorchDispatchMode):
    """Counts the collectives of a `with` block on this rank.

    (torch's CommDebugMode puts hooks on modules, with which pipelines' halved backwards do not run.)
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.calls, self.bytes = Bytes(), Bytes()
        used = [axis for axis in mesh.AXES if mesh.size(axis) > 1]
        self.axes = {tuple(dist.get_process_group_ranks(mesh.dense.get_group(axis))): axis for axis in used}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in _FREE:
            kind, place = _KINDS[name]
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            axis = self.axes[tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))]
            whole = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            self.calls[kind, axis] += 1
            self.bytes[kind, axis] += sum(tensor.nbytes for tensor in whole)
        assert func.namespace != "_c10d_functional", f"{func} is not counted"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Facts:
    """What the formulas need to know of one rank's part of a cell; parameters are float32, 4 bytes an element."""

    cell: Cell
    sizes: dict[str, int]  # mesh axes
    shapes: dict[str, tuple[int, ...]]  # of this rank's parameters, as they are along `tp`
    trained: frozenset[str]
    cut: frozenset[str]  # dealt out along tp
    num_microbatches: int
    num_targets: int
    hidden_bytes: int  # of a micro-batch's hidden states [B, T, D]
    num_tokens: int  # of a micro-batch
    num_blocks: int  # of this rank's layers, that are dealt out along tp
    num_mixers: int  # of them in the first layer
    in_blocks: frozenset[str]  # parameters
    first: bool  # this rank has the embedding
    last: bool  # and the head
    kept_gathered: frozenset[str]  # fsdp2: parameters whose backward follows their forward at once

    @property
    def sp(self) -> bool:
        return self.cell.layout.endswith("-sp")

    def bytes_of(self, names: Iterable[str], num_shards: int = 1) -> int:
        """Of the whole of these parameters, each rounded up to `num_shards` equal shares of one dim."""
        total = 0
        for name in names:
            shape = self.shapes[name]
            dim = shard_dim(shape, num_shards)
            total += prod(shape) // shape[dim] * (-(-shape[dim] // num_shards) * num_shards)
        return 4 * total


def numbers(facts: Facts) -> Bytes:
    """Once a step: targets (int64) over the data axes, the loss over these and stages; the norm's squares, for each set
    of axes that trained parameters are cut along over these axes, and over stages."""
    found = Bytes()
    shards = {"zero1": "dp_replicate", "zero2": "dp_replicate", "fsdp2": "dp_shard", "hsdp": "dp_shard"}
    data = tuple(filter(None, [shards.get(facts.cell.data)]))
    sets = {data + ("tp",) * (name in facts.cut) for name in facts.trained}
    for axis in ("dp_replicate", "dp_shard"):
        found["all-reduce", axis] += 8
    for axis in ("pp", "dp_replicate", "dp_shard"):
        found["all-reduce", axis] += 4
    for axis in ("pp", *(axis for axes in sets for axis in axes)):
        found["all-reduce", axis] += 4
    return found


def ddp(facts: Facts) -> Bytes:
    """Trained gradients, in float32, once a step."""
    return Bytes({("all-reduce", "dp_replicate"): facts.bytes_of(facts.trained)})


def zero(facts: Facts) -> Bytes:
    """Trained gradients are reduce-scattered, by stage 2 once per micro-batch; updated weights are gathered."""
    whole = facts.bytes_of(facts.trained, facts.sizes["dp_replicate"])
    times = 1 if facts.cell.data == "zero1" else facts.num_microbatches
    return Bytes({("reduce-scatter", "dp_replicate"): times * whole, ("all-gather", "dp_replicate"): whole})


def fsdp2(facts: Facts) -> Bytes:
    """Per micro-batch: all weights are gathered for the forward, and again for the backward but for the last unit's;
    trained gradients are reduce-scattered. HSDP: the shares of trained gradients are added up over replicas once."""
    n = facts.sizes["dp_shard"]
    gathered = facts.bytes_of(facts.shapes, n) + facts.bytes_of(facts.shapes.keys() - facts.kept_gathered, n)
    trained = facts.bytes_of(facts.trained, n)
    return Bytes(
        {
            ("all-gather", "dp_shard"): facts.num_microbatches * gathered,
            ("reduce-scatter", "dp_shard"): facts.num_microbatches * trained,
            ("all-reduce", "dp_replicate"): trained // n,
        }
    )


def tensor(facts: Facts) -> Bytes:
    """Per micro-batch, in units of its hidden states:

    the embedding's rows are added up; each block's summands; backwards the summands of each block's input's gradient,
    and of the head's. With LoRA nothing is trained below the first layer's mixers, so no gradient of their input
    is wanted.
    With sequence parallelism a reduce-scatter stands in the place of a block's first sum and of its gradient's, and an
    all-gather before the block and before the backward of what follows it; one all-gather lies before the head or at
    the end of a stage, and one brings together the gradient of what the embedding or the stage below has given.
    Besides: what a few families add up within blocks; three numbers per target (largest logit, sum of exponentials,
    the target's logit); once a step the gradients of what every rank holds whole and computes a summand of.
    """
    n = facts.sizes["dp_shard"]
    below = facts.num_mixers if facts.first and facts.cell.mode == "lora" else 0
    inputs = facts.num_blocks - below + facts.last  # of which a gradient is wanted: of blocks and of the head
    units = Bytes()
    units["all-reduce", "tp"] += facts.first
    if facts.sp:
        units["reduce-scatter", "tp"] += facts.num_blocks + inputs
        units["all-gather", "tp"] += facts.num_blocks + facts.num_blocks + 1 + (below == 0)
    else:
        units["all-reduce", "tp"] += facts.num_blocks + inputs
    found = Bytes({key: facts.num_microbatches * facts.hidden_bytes * value for key, value in units.items()})
    ends = {name for name in facts.trained if not facts.sp and name not in facts.in_blocks}  # the same on every rank
    found["all-reduce", "tp"] += facts.bytes_of(facts.trained - facts.cut - ends, n) // n
    found["all-reduce", "tp"] += facts.last * facts.num_targets * 3 * 4
    tokens = facts.num_microbatches * facts.num_tokens
    found["all-reduce", "tp"] += 2 * tokens * WITHIN.get(facts.cell.family, 0) * 4
    return found


def pipeline(facts: Facts) -> Bytes:
    """Per micro-batch and cut between ranks: hidden states go up, and their gradient comes down."""
    neighbours = (not facts.first) + (not facts.last)
    return Bytes({("send", "pp"): facts.num_microbatches * neighbours * facts.hidden_bytes})


def expected(facts: Facts) -> Bytes:
    """What every part of the layout sends; they add up."""
    parts: dict[str, Callable[[Facts], Bytes]] = {
        "ddp": ddp,
        "zero1": zero,
        "zero2": zero,
        "fsdp2": fsdp2,
        "hsdp": fsdp2,
        "tp": tensor,
        "pp": pipeline,
    }
    total = numbers(facts)
    for name in facts.cell.layout.split("-"):
        if name in parts:
            total += parts[name](facts)
    return Bytes({(kind, axis): size for (kind, axis), size in total.items() if facts.sizes[axis] > 1 and size})


def sent_bytes(whole: Bytes, sizes: dict[str, int]) -> int:
    """What leaves one rank if every collective runs around a ring."""
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    total = 0.0
    for (kind, axis), size in whole.items():
        n = sizes[axis]
        total += size * (rounds[kind] * (n - 1) / n if kind in rounds else 1)
    return round(total)


@dataclass(frozen=True)
class Counted:
    """One rank's third step."""

    facts: Facts
    bytes: Bytes
    calls: Bytes


def count(cell: Cell) -> Counted:
    """Count a step of this rank; the process group must be up."""
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    for step in (1, 2):  # in the first ones ddp agrees upon its buckets, and pipelines make their stages ready
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
    batches = microbatches(cfg, mesh, 3)
    with Collectives(mesh) as collectives:
        training_step(job, batches, mesh, 1.0)
    return Counted(_facts(cell, job, mesh, batches), collectives.bytes, collectives.calls)


def _facts(cell: Cell, job: Job, mesh: Mesh, batches: Sequence[Batch]) -> Facts:
    specs = [part.spec for part in job.pm.parts if isinstance(part, CausalLM)]
    named = dict(job.pm.named_parameters())
    sizes = {axis: mesh.size(axis) for axis in mesh.AXES}
    blocks = [
        f"{layer.name}.{path}."
        for part in job.pm.parts
        if isinstance(part, CausalLM)
        for layer in part.spec.layers
        for path in FAMILIES[cell.family].splits
        if any(name.startswith(f"{layer.name}.{path}.") for name in named)
    ]
    cut = {name: _tp_dim(parameter) for name, parameter in named.items()}
    shapes = {name: [*parameter.shape] for name, parameter in named.items()}
    for name, dim in cut.items():
        if dim is not None:
            shapes[name][dim] //= sizes["tp"]
    first, last = any(spec.first for spec in specs), any(spec.last for spec in specs)
    ends = tuple(f"{path}." for spec in specs if spec.last for path in (spec.norm, spec.head))
    return Facts(
        cell=cell,
        sizes=sizes,
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        trained=frozenset(name for name, parameter in named.items() if parameter.requires_grad),
        cut=frozenset(name for name, dim in cut.items() if dim is not None),
        num_microbatches=len(batches),
        num_targets=sum(batch.num_target_tokens() for batch in batches),
        hidden_bytes=4 * batches[0].input_ids.numel() * job.spec.hidden_size,
        num_tokens=batches[0].input_ids.numel(),
        num_blocks=len(blocks),
        num_mixers=len(FAMILIES[cell.family].token_mixers.get(job.spec.layers[0].kind, ("attn",))),
        in_blocks=frozenset(name for name in named if name.startswith(tuple(blocks))),
        first=first,
        last=last,
        kept_gathered=frozenset(name for name in named if name.startswith(ends)) if ends else frozenset(),
    )


def _tp_dim(parameter: torch.Tensor) -> int | None:
    """Along which dim a parameter is dealt out; none if every rank has it whole."""
    if not isinstance(parameter, DTensor):
        return None
    return next((p.dim for a, p in zip(axes_of(parameter), parameter.placements) if a == "tp" and p.is_shard()), None)
