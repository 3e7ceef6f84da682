"""Closed formulas of what one training step sends, from shapes and the mesh; no number in them is a counted one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod

from shardwise.parallel.place import shard_dim
from tests.parity.harness import Cell


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
    "olmo_hybrid": (
        2,
        2,
    ),  # an attention layer, whose q and k are each normalised over all heads: their squares' sums
    "jamba": (
        2,
        2 * (6 + 2 * 8),
    ),  # two Mamba layers, where all channels give the time step's factor, B and C
    "granitemoehybrid": (1, 2),  # on 4 ranks: a Mamba2 layer, whose norm is over 2 groups
}
"""Messages, and numbers per token, that blocks of the tiny models add up within themselves; backwards as many again."""


def add_up(sent: Iterable[Sent]) -> Total:
    """Of messages that may be alike."""
    calls, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in sent:
        calls[message.kind, message.axis] += message.calls
        size[message.kind, message.axis] += message.bytes
    return {key: (number, size[key]) for key, number in calls.items() if number}


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
    shared_bytes: tuple[int, ...]  # of what several tp ranks hold of trained ones, each whole
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
        return next(
            (d for d, size in enumerate(shape) if d != self.cut[name] and size % num_shards == 0),
            None,
        )

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
    shards = {"zero1": "dp_replicate", "zero2": "dp_replicate"} | dict.fromkeys(
        ("fsdp1", "fsdp2", "hsdp"), "dp_shard"
    )
    data = shards.get(facts.cell.data)
    whole = facts.whole(facts.trained, facts.sizes[data]) if data else facts.trained
    sets = {(data,) * (name not in whole) + ("tp",) * (name in facts.cut) for name in facts.trained}
    for axis in ("dp_replicate", "dp_shard"):
        yield Sent("all-reduce", axis, 1, 8)
    for axis in (
        "pp",
        "dp_replicate",
        "dp_shard",
        "pp",
        *(axis for axes in sets for axis in axes if axis),
    ):
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

    With LoRA a layer's adapters are one of their own (or, if wrapped naively, lie in the layer's, and all of it has a
    gradient).
    """
    n, m = facts.sizes["dp_shard"], facts.num_microbatches
    has_backward = False
    for unit in facts.units:
        own = unit.names & facts.trained
        has_backward |= bool(own)
        gathers = 2 * m if has_backward and not unit.kept else m
        flat = [unit.names]
        if own != unit.names and facts.cell.variant != "naive":
            flat = [unit.names - own, own]
        for names in filter(None, flat):
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
    and of what neighbours hold alike: heads of keys and of values, groups of B and of C, one by one.
    """
    m = facts.num_microbatches
    below = facts.num_mixers if facts.first and facts.cell.mode == "lora" else 0
    inputs = (
        facts.num_blocks - below + facts.last
    )  # of which a gradient is wanted: of blocks and of the head
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
    ends = {
        name for name in facts.trained if not facts.sp and name not in facts.in_blocks
    }  # the same on every rank
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
