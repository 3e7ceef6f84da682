"""What one training step sends: every collective that is called, with its group and its bytes, and closed formulas.

Counted is what a call is given, not what a backend makes of it (gloo's reduce-scatter is an all-reduce inside).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.interfaces import Batch, Mesh
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.lora import inject
from shardwise.models.spec import ModelSpec
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import axes_of, shard_dim
from shardwise.training.build import Job, build
from shardwise.training.step import training_step
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


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one mesh axis: how many, and the bytes of all their whole tensors together."""

    kind: str
    axis: str
    calls: int
    bytes: int


Total = dict[tuple[str, str], tuple[int, int]]
"""By (kind, mesh axis): calls and bytes."""

WITHIN = {
    "olmo_hybrid": (2, 2),  # an attention layer, whose q and k are each normalised over all heads: their squares' sums
    "jamba": (2, 2 * (6 + 2 * 8)),  # two Mamba layers, where all channels give the time step's factor, B and C
}
"""Messages, and numbers per token, that blocks of the tiny models add up within themselves; backwards as many again."""


def add_up(sent: Iterable[Sent]) -> Total:
    """Of messages that may be alike."""
    calls, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in sent:
        calls[message.kind, message.axis] += message.calls
        size[message.kind, message.axis] += message.bytes
    return {key: (number, size[key]) for key, number in calls.items() if number}


class Collectives(TorchDispatchMode):
    """Counts the collectives of a `with` block on this rank.

    (torch's CommDebugMode puts hooks on modules, with which pipelines' halved backwards do not run.)
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        used = [axis for axis in mesh.AXES if mesh.size(axis) > 1]
        self.axes = {tuple(dist.get_process_group_ranks(mesh.dense.get_group(axis))): axis for axis in used}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in _FREE:
            kind, place = _KINDS[name]
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            axis = self.axes[tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))]
            self.sent.append(Sent(kind, axis, 1, sum(tensor.nbytes for tensor in tree_leaves(args[place]))))
        assert func.namespace != "_c10d_functional", f"{func} is not counted"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Unit:
    """Parameters that fsdp gathers together."""

    names: frozenset[str]
    kept: bool = False  # gathered until their backward, which follows their forward at once


@dataclass(frozen=True)
class Facts:
    """What the formulas need to know of one rank's part of a cell; parameters are float32, 4 bytes an element.

    All gradients of a tiny model fit into one bucket (1 MiB in ddp, 16 MiB or more elsewhere).
    """

    cell: Cell
    sizes: dict[str, int]  # mesh axes
    shapes: dict[str, tuple[int, ...]]  # of this rank's parameters, as they are along `tp`
    trained: frozenset[str]
    cut: dict[str, int]  # the dim along which tp deals a parameter out
    units: tuple[Unit, ...]  # embedding, layers, norm with head
    tied: frozenset[str]  # the embedding's weight, where another stage has it too
    num_microbatches: int
    num_targets: int
    hidden_bytes: int  # of a micro-batch's hidden states [B, T, D]
    num_tokens: int  # of a micro-batch
    num_blocks: int  # of this rank's layers, that are dealt out along tp
    num_mixers: int  # of them in the first layer
    in_blocks: frozenset[str]  # parameters
    shared_bytes: tuple[int, ...]  # of the whole of each trained one of keys or values, of fewer heads than tp ranks
    first: bool  # this rank has the embedding
    last: bool  # and the head

    @property
    def sp(self) -> bool:
        return self.cell.layout.endswith("-sp")

    def shard_dim(self, name: str, num_shards: int) -> int | None:
        """Of what tp has cut, another dim; None if no other divides evenly: it stays whole over data ranks."""
        shape = self.shapes[name]
        if name not in self.cut:
            return shard_dim(shape, num_shards)
        return next((d for d, size in enumerate(shape) if d != self.cut[name] and size % num_shards == 0), None)

    def whole(self, names: Iterable[str], num_shards: int) -> frozenset[str]:
        """Those that no data rank has a share of."""
        return frozenset(name for name in names if self.shard_dim(name, num_shards) is None)

    def bytes_of(self, names: Iterable[str], num_shards: int = 1) -> int:
        """Of these parameters, each rounded up to `num_shards` equal shares of one dim."""
        total = 0
        for name in names:
            shape, dim = self.shapes[name], self.shard_dim(name, num_shards) or 0
            total += prod(shape) // shape[dim] * (-(-shape[dim] // num_shards) * num_shards)
        return 4 * total


def numbers(facts: Facts) -> Iterator[Sent]:
    """Once a step: targets (int64) over the data axes, the loss over these and stages; the norm's squares, for each set
    of axes that trained parameters are cut along over these axes, and over stages."""
    shards = {"zero1": "dp_replicate", "zero2": "dp_replicate"} | dict.fromkeys(("fsdp1", "fsdp2", "hsdp"), "dp_shard")
    data = shards.get(facts.cell.data)
    whole = facts.whole(facts.trained, facts.sizes[data]) if data else facts.trained
    sets = {(data,) * (name not in whole) + ("tp",) * (name in facts.cut) for name in facts.trained}
    for axis in ("dp_replicate", "dp_shard"):
        yield Sent("all-reduce", axis, 1, 8)
    for axis in ("pp", "dp_replicate", "dp_shard", "pp", *(axis for axes in sets for axis in axes if axis)):
        yield Sent("all-reduce", axis, 1, 4)


def ddp(facts: Facts) -> Iterator[Sent]:
    """Trained gradients, in float32, once a step."""
    yield Sent("all-reduce", "dp_replicate", 1, facts.bytes_of(facts.trained))


def zero(facts: Facts) -> Iterator[Sent]:
    """Trained gradients are reduce-scattered, by stage 2 once per micro-batch; updated weights are gathered."""
    n = facts.sizes["dp_replicate"]
    left = facts.whole(facts.trained, n)
    size = facts.bytes_of(facts.trained - left, n)
    times = 1 if facts.cell.data == "zero1" else facts.num_microbatches
    yield Sent("reduce-scatter", "dp_replicate", times, times * size)
    yield Sent("all-gather", "dp_replicate", 1, size)
    yield Sent("all-reduce", "dp_replicate", bool(left), facts.bytes_of(left))


def fsdp1(facts: Facts) -> Iterator[Sent]:
    """As fsdp2, of flat parameters; what has nothing trained in it or below is not gathered for a backward.

    With LoRA each factor is a unit of its own (or, if wrapped naively, a layer is one with its adapters, and all of it
    has a gradient).
    """
    n, m = facts.sizes["dp_shard"], facts.num_microbatches
    has_backward = False
    for unit in facts.units:
        own = unit.names & facts.trained
        has_backward |= bool(own)
        gathers = 2 * m if has_backward and not unit.kept else m
        flat = [unit.names]
        if own != unit.names and facts.cell.variant != "naive":
            flat = [unit.names - own, *(frozenset([factor]) for factor in own)]
        for names in flat:
            size = 4 * -(-sum(prod(facts.shapes[name]) for name in names) // n) * n
            yield Sent("all-gather", "dp_shard", gathers, gathers * size)
            if names & own:
                yield Sent("reduce-scatter", "dp_shard", m, m * size)


def fsdp2(facts: Facts) -> Iterator[Sent]:
    """Per micro-batch each unit of weights is gathered for the forward, and again for the backward but for the last;
    trained gradients are reduce-scattered. HSDP: the shares of trained gradients are added up over replicas once.

    In a pipeline gradients are reduce-scattered once a step, and a backward leaves the weights gathered for whatever
    comes next: they are gathered at first, and after every forward.
    """
    n, m = facts.sizes["dp_shard"], facts.num_microbatches
    forwards, reductions = (1, 1) if facts.sizes["pp"] > 1 else (m, m)
    left = facts.whole(facts.shapes, n)
    for unit in facts.units:
        names = unit.names - left
        gathers = forwards + (0 if unit.kept else m)
        yield Sent("all-gather", "dp_shard", gathers, gathers * facts.bytes_of(names, n))
        if own := names & facts.trained:
            size = facts.bytes_of(own, n)
            yield Sent("reduce-scatter", "dp_shard", reductions, reductions * size)
            yield Sent("all-reduce", "dp_replicate", 1, size // n)
    if left & facts.trained:
        for axis in ("dp_replicate", "dp_shard"):
            yield Sent("all-reduce", axis, 1, facts.bytes_of(left & facts.trained))


def tensor(facts: Facts) -> Iterator[Sent]:
    """Per micro-batch, in units of its hidden states:

    the embedding's rows are added up; each block's summands; backwards the summands of each block's input's gradient,
    and of the head's. With LoRA nothing is trained below the first layer's mixers, so no gradient of their input
    is wanted.
    With sequence parallelism a reduce-scatter stands in the place of a block's first sum and of its gradient's, and an
    all-gather before the block and before the backward of what follows it; one all-gather lies before the head or at
    the end of a stage, and one brings together the gradient of what the embedding or the stage below has given.
    Besides: what a few families add up within blocks; three numbers per target (largest logit; sum of exponentials and
    the target's logit, together); once a step the gradients of what every rank holds whole and computes a summand of,
    and of each weight of keys or values whose heads are fewer than ranks.
    """
    m = facts.num_microbatches
    below = facts.num_mixers if facts.first and facts.cell.mode == "lora" else 0
    inputs = facts.num_blocks - below + facts.last  # of which a gradient is wanted: of blocks and of the head
    units = Counter({"all-reduce": int(facts.first)})
    if facts.sp:
        units["reduce-scatter"] += facts.num_blocks + inputs
        units["all-gather"] += facts.num_blocks + facts.num_blocks + 1 + (below == 0)
    else:
        units["all-reduce"] += facts.num_blocks + inputs
    for kind, number in units.items():
        yield Sent(kind, "tp", m * number, m * number * facts.hidden_bytes)
    messages, per_token = WITHIN.get(facts.cell.family, (0, 0))
    yield Sent("all-reduce", "tp", 2 * m * messages, 2 * m * facts.num_tokens * per_token * 4)
    yield Sent("all-reduce", "tp", facts.last * m * 2, facts.last * facts.num_targets * 3 * 4)
    n = facts.sizes["dp_shard"]
    ends = {name for name in facts.trained if not facts.sp and name not in facts.in_blocks}  # the same on every rank
    summands = facts.trained - facts.cut.keys() - ends
    yield Sent("all-reduce", "tp", bool(summands), facts.bytes_of(summands, n) // n)
    for size in facts.shared_bytes:
        yield Sent("all-reduce", "tp", 1, size // n)


def pipeline(facts: Facts) -> Iterator[Sent]:
    """Per micro-batch and cut between ranks: hidden states go up, and their gradient comes down.

    Once a step: the first and the last stage exchange their gradients of a tied weight.
    """
    calls = facts.num_microbatches * ((not facts.first) + (not facts.last))
    yield Sent("send", "pp", calls, calls * facts.hidden_bytes)
    n = facts.sizes["dp_shard"]
    yield Sent("send", "pp", bool(facts.tied), facts.bytes_of(facts.tied, n) // n)


FORMULAS: dict[str, Callable[[Facts], Iterator[Sent]]] = {
    "ddp": ddp,
    "zero1": zero,
    "zero2": zero,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "hsdp": fsdp2,
    "tp": tensor,
    "pp": pipeline,
}
"""By part of a layout; what the parts send adds up. `sp` is in tp's."""


def expected(facts: Facts) -> Total:
    """What every part of the layout sends, along axes that there are."""
    parts = [FORMULAS[part](facts) for part in facts.cell.layout.split("-") if part != "sp"]
    return add_up(sent for sent in chain(numbers(facts), *parts) if facts.sizes[sent.axis] > 1)


def sent_bytes(whole: Total, sizes: dict[str, int]) -> int:
    """What leaves one rank if every collective runs around a ring."""
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    total = 0.0
    for (kind, axis), (_, size) in whole.items():
        n = sizes[axis]
        total += size * (rounds[kind] * (n - 1) / n if kind in rounds else 1)
    return round(total)


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
    for step in (1, 2):  # in the first ones ddp agrees upon its buckets, and pipelines make their stages ready
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
        for path in FAMILIES[cell.family].splits
        if any(name.startswith(f"{layer.name}.{path}.") for name in named)
    ]
    cut = {name: dim for name, parameter in named.items() if (dim := _tp_dim(parameter)) is not None}
    whole = _shapes(cell)
    shapes = {name: [*whole[name]] for name in named}
    for name, dim in cut.items():  # rows that several ranks hold are there more than once
        shapes[name][dim] = named[name].shape[dim] // sizes["tp"]
    trained = frozenset(name for name, parameter in named.items() if parameter.requires_grad)
    shares_heads = getattr(job.hf.config, "num_key_value_heads", sizes["tp"]) < sizes["tp"]
    keys = [n for n in trained & cut.keys() if {"k_proj", "v_proj"} & set(n.split("."))] if shares_heads else []
    first, last = any(spec.first for spec in specs), any(spec.last for spec in specs)
    tied = frozenset([f"{job.spec.embed}.weight"] if job.spec.tied and first != last and cell.mode == "full" else [])
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
        num_mixers=len(FAMILIES[cell.family].token_mixers.get(job.spec.layers[0].kind, ("attn",))),
        in_blocks=frozenset(name for name in named if name.startswith(tuple(blocks))),
        shared_bytes=tuple(4 * prod(whole[name]) for name in keys),
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
    return next((p.dim for a, p in zip(axes_of(parameter), parameter.placements) if a == "tp" and p.is_shard()), None)
