"""What data parallelism holds of gradients and buffers at each moment of a micro-batch.

A class here mirrors a file of `parallel/`. It knows nothing of activations, which `peak.py` adds.
Where the file says "copy", gloo copies what a collective gathers or scatters, and NCCL does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.assembly.costs import gradient_bytes
from shardwise.config import RunConfig
from shardwise.models.activations import UnitMemory
from shardwise.parallel.zero import BUCKET_BYTES
from shardwise.planner.share import Weight
from shardwise.planner.units import Unit as Gathered
from shardwise.planner.units import flat_parameters, flat_spans


@dataclass(frozen=True)
class Unit:
    """The embedding, a layer, or final norm and head, as a rank holds it."""

    name: str
    memory: UnitMemory
    weights: tuple[Weight, ...]

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


class Held(NamedTuple):
    """The bytes that a strategy holds at a moment of a unit."""

    moment: str
    gradients: int
    buffers: int = 0
    runs: bool = True
    """Whether the unit computes at that moment, or its weights or gradients are on their way."""


class Whole:
    """Every rank holds complete gradients: one process, zero1, and what is not sharded over data.

    The first micro-batch leaves its gradients. Those of a later one are added to them, one weight
    after the other.
    """

    def __init__(
        self, cfg: RunConfig, units: Sequence[Unit], num_shards: int, is_gloo: bool
    ) -> None:
        self.cfg, self.units, self.num_shards, self.is_gloo = cfg, units, num_shards, is_gloo
        sizes = [[self._gradient(weight) for weight in unit.trained] for unit in units]
        self.gradients = [sum(of_unit) for of_unit in sizes]
        self.largest = [max(of_unit, default=0) for of_unit in sizes]
        self.total = sum(self.gradients)
        self.is_first = self.is_last = True

    def _gradient(self, weight: Weight) -> int:
        return gradient_bytes(self.cfg, weight.numel, weight.itemsize)

    def begin(self, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch: whether it is the first or the last one of a step."""
        self.is_first, self.is_last = is_first, is_last

    def forward(self, place: int) -> Iterator[Held]:
        """Yield what is held before and while a unit runs forward."""
        yield Held("forward", 0 if self.is_first else self.total)

    def backward(self, place: int) -> Iterator[Held]:
        """Yield what is held before and while a unit runs backward.

        Of its new gradients, those that are added to older ones are part of what the unit needs.
        New ones stay. While activations are large, in the first products of the backward, one of
        them is there.
        """
        if self.is_first:
            yield Held("backward", sum(self.gradients[place + 1 :]) + self.largest[place])
        else:
            yield Held("backward", self.total)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield what is held after the backward of a unit, while its gradients are reduced."""
        yield Held("end", sum(self.gradients[place:]) if self.is_first else self.total, runs=False)

    def last_reduction(self) -> Iterator[Held]:
        """Yield what is held after the last backward of a step."""
        yield from ()


class Ddp(Whole):
    """Buckets hold a gradient of every weight, also between steps (parallel/ddp.py).

    Micro-batches before the last have gradients of their own beside them. In the last one a
    gradient is copied into its bucket and freed as soon as it is there.
    """

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield Held("forward", 0 if self.is_first else self.total, self.total)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        if not self.is_last:
            yield from (held._replace(buffers=self.total) for held in super().backward(place))
        elif self.is_first:
            yield Held("backward", 0, self.total)
        else:
            yield Held("backward", sum(self.gradients[: place + 1]), self.total)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        if not self.is_last:
            yield from (held._replace(buffers=self.total) for held in super().reduction(place))


class Zero1(Whole):
    """Complete gradients add up, and buckets of them are reduced after the last backward.

    A bucket is copied into a buffer in float32 and freed; its sum is 1/n of it (parallel/zero.py).
    """

    def last_reduction(self) -> Iterator[Held]:
        """See Whole."""
        left, shards = self.total, 0
        for bucket in buckets([w for unit in self.units[::-1] for w in unit.trained[::-1]]):
            size = sum(map(self._gradient, bucket))
            yield from self._scattered(bucket, left + shards)
            left, shards = left - size, shards + size // self.num_shards

    def _scattered(self, bucket: Sequence[Weight], gradients: int) -> Iterator[Held]:
        sent = 4 * sum(weight.padded_numel(self.num_shards) for weight in bucket)
        freed = gradients - sum(map(self._gradient, bucket))
        copy = sent if self.is_gloo else 0
        yield Held("reduction", gradients, sent, runs=False)
        yield Held("reduction", freed, sent + copy + sent // self.num_shards, runs=False)


class Zero2(Zero1):
    """Buckets are reduced in each backward, as soon as they are full."""

    def __init__(
        self, cfg: RunConfig, units: Sequence[Unit], num_shards: int, is_gloo: bool
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo)
        places = {w: place for place, unit in enumerate(units) for w in unit.trained}
        self.ready: dict[int, list[list[Weight]]] = {}
        """The buckets that the backward of a unit completes, by its place."""
        for bucket in buckets([w for unit in units[::-1] for w in unit.trained[::-1]]):
            self.ready.setdefault(places[bucket[-1]], []).append(bucket)
        self.shards = self.pending = 0
        """Bytes of the shards' gradients, and of those that wait for the rest of their bucket."""

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield Held("forward", self.shards)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield Held("backward", self.shards + self.pending + self.largest[place])

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        self.pending += self.gradients[place]
        for bucket in self.ready.get(place, ()):
            yield from self._scattered(bucket, self.shards + self.pending)
            size = sum(map(self._gradient, bucket))
            self.pending -= size
            if self.is_first:
                self.shards += size // self.num_shards

    def last_reduction(self) -> Iterator[Held]:
        """See Whole."""
        yield from ()


class Sharded(Whole):
    """What fsdp1 and fsdp2 share: a unit's weights are gathered around its forward and backward.

    In a backward the weights of the next unit come while one runs. Its gradients are
    reduce-scattered when it has ended. The root's weights stay gathered.
    """

    def __init__(
        self, cfg: RunConfig, units: Sequence[Unit], num_shards: int, is_gloo: bool
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo)
        self.gathered = [self._gathered(unit.weights) for unit in units]
        self.sent = [self._sent(unit.trained) for unit in units]
        self.shards = 0
        """Bytes of the shards' gradients."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of these weights when they are gathered."""
        raise NotImplementedError

    def _sent(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of these weights' gradients as they are reduce-scattered."""
        raise NotImplementedError

    def _below(self, place: int) -> int:
        """Return the bytes of the gathered weights of the unit below."""
        return self.gathered[place - 1] if place else 0


class Fsdp2(Sharded):
    """parallel/fsdp2.py: each weight is gathered into a flat tensor, and copied out of it.

    In a forward the flat tensor of a unit stays until the next unit is gathered; in a backward that
    of the next unit comes early. The summands of a reduce-scatter stay until the next one.
    """

    def __init__(
        self, cfg: RunConfig, units: Sequence[Unit], num_shards: int, is_gloo: bool
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo)
        self.summands = 0

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(w.padded_numel(self.num_shards) * w.itemsize for w in weights)

    def _sent(self, weights: Sequence[Weight]) -> int:
        return sum(4 * weight.padded_numel(self.num_shards) for weight in weights)

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own = self.gathered[place]
        copy = own if self.is_gloo else 0
        yield Held("gather", self.shards, self._below(place) + own + copy, runs=False)
        yield Held("forward", self.shards, 2 * own)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        below = self._below(place)
        buffers = self.gathered[place] + below + self.summands
        copy = below if self.is_gloo else 0
        yield Held("gather", self.shards, buffers + copy, runs=False)
        yield Held("backward", self.shards + self.largest[place], buffers)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        sent, below = self.sent[place], self._below(place)
        if sent:
            self.summands = sent
            gradients = self.gradients[place]
            part = sent // self.num_shards
            copy = sent if self.is_gloo else 0
            yield Held("reduction", self.shards + gradients, below + sent, runs=False)
            yield Held("reduction", self.shards + part, below + sent + copy, runs=False)
            if self.is_first:
                self.shards += gradients // self.num_shards
        if place == 0:
            self.summands = 0


class Fsdp1(Sharded):
    """parallel/fsdp1.py: the weights of a unit are views into a flat parameter."""

    def _flat(self, weights: Sequence[Weight]) -> int:
        size = 0
        for flat in flat_parameters(Gathered(tuple(weights), False), self.cfg.parallel.fsdp1_wrap):
            end = flat_spans(flat)[-1][1]
            size += -(-end // self.num_shards) * self.num_shards * flat[0].itemsize
        return size

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return self._flat(weights)

    def _sent(self, weights: Sequence[Weight]) -> int:
        return self._flat(weights)

    def __init__(
        self, cfg: RunConfig, units: Sequence[Unit], num_shards: int, is_gloo: bool
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo)
        self.root, self.gathered[-1] = self.gathered[-1], 0

    def _root(self, place: int) -> int:
        """Return the bytes of the gathered root in a backward: a trained one is freed first."""
        return 0 if self.sent[-1] and place < len(self.units) - 1 else self.root

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own = self.gathered[place]
        copy = own if self.is_gloo else 0
        yield Held("gather", self.shards, self.root + own + copy, runs=False)
        yield Held("forward", self.shards, self.root + own)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        below = self._below(place)
        buffers = self._root(place) + self.gathered[place] + below
        copy = below if self.is_gloo else 0
        yield Held("gather", self.shards, buffers + copy, runs=False)
        yield Held("backward", self.shards + self.largest[place], buffers)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield the joining of a unit's gradients into a flat one, and its reduction."""
        sent, below = self.sent[place], self._below(place)
        if sent:
            part = sent // self.num_shards
            gathered = self._root(place) + self.gathered[place] + below
            below += self._root(max(0, place - 1))
            copy = sent if self.is_gloo else 0
            yield Held(
                "reduction", self.shards + self.gradients[place] + sent, gathered, runs=False
            )
            yield Held("reduction", self.shards + sent + part, below + copy, runs=False)
            if self.is_first:
                self.shards += part


def buckets(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Yield the buckets of at most BUCKET_BYTES that zero makes of weights."""
    bucket: list[Weight] = []
    for weight in weights:
        size = sum(w.numel * w.itemsize for w in (*bucket, weight))
        if bucket and size > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket


HOLDING: dict[str, type[Whole]] = {
    "single": Whole,
    "ddp": Ddp,
    "zero1": Zero1,
    "zero2": Zero2,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
}
