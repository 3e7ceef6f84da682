"""What data parallelism holds of gradients and buffers at each moment of a micro-batch.

A class here mirrors a file of `parallel/`. It knows nothing of activations, which `peak.py` adds.
Where the file says "copy", gloo copies what a collective gathers or scatters, and NCCL does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.assembly.costs import gradient_bytes
from shardwise.config import RunConfig
from shardwise.models.activations import UnitMemory
from shardwise.parallel.zero import BUCKET_BYTES
from shardwise.planner.units import Unit as Gathered
from shardwise.planner.units import flat_parameters, flat_spans
from shardwise.planner.weights import Weight


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
        self,
        cfg: RunConfig,
        units: Sequence[Unit],
        num_shards: int,
        is_gloo: bool,
        tied: Weight | None = None,
    ) -> None:
        """Take the units of a chunk; `tied`: the weight that both ends of the chunk use."""
        self.cfg, self.units, self.num_shards, self.is_gloo = cfg, units, num_shards, is_gloo
        self.tied = tied
        sizes = [{weight: self._gradient(weight) for weight in unit.trained} for unit in units]
        self.gradients = [sum(of_unit.values()) for of_unit in sizes]
        # The head makes a gradient of a tied weight, to which the embedding adds its own at last.
        self.early = sizes[0].pop(tied, 0) if tied else 0
        self.largest = [max(of_unit.values(), default=0) for of_unit in sizes]
        is_kept = cfg.training.loss != "plain" and units[-1].name == "the head"
        if is_kept and all(weight.itemsize == 4 for weight in units[-1].trained):
            self.largest[-1] = 0  # Among what the loss keeps is the gradient of its weight.
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
            new = sum(self.gradients[place + 1 :]) + self.largest[place]
            yield Held("backward", new + self.early)
        else:
            yield Held("backward", self.total + self.early)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield what is held after the backward of a unit, while its gradients are reduced."""
        gradients = sum(self.gradients[place:]) if self.is_first else self.total
        yield Held("end", gradients + (self.early if place else 0), runs=False)

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
            yield Held("backward", self.early, self.total)
        else:
            yield Held("backward", sum(self.gradients[: place + 1]) + self.early, self.total)

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
        sent = 4 * sum(weight.padded_numel for weight in bucket)
        freed = gradients - sum(map(self._gradient, bucket))
        copy = sent if self.is_gloo else 0
        yield Held("reduction", gradients, sent, runs=False)
        yield Held("reduction", freed, sent + copy + sent // self.num_shards, runs=False)


class Zero2(Zero1):
    """Buckets are reduced in each backward, as soon as they are full."""

    def __init__(
        self,
        cfg: RunConfig,
        units: Sequence[Unit],
        num_shards: int,
        is_gloo: bool,
        tied: Weight | None = None,
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo, tied)
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
        gradients = self.shards + self.pending + self.early
        yield Held("backward", gradients + self.largest[place])

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

    In a backward the weights of the next unit come while one runs, and its gradients are
    reduce-scattered when it has ended. The root has the weights that are no unit's (`rest`). They
    are gathered for the complete forward, and until their gradients are reduced.
    """

    def __init__(
        self,
        cfg: RunConfig,
        units: Sequence[Unit],
        num_shards: int,
        is_gloo: bool,
        tied: Weight | None = None,
        rest: Collection[Weight] = (),
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo, tied)
        of_root = [weight for unit in units for weight in unit.weights if weight in rest]
        of_units = [[w for w in unit.weights if w not in rest] for unit in units]
        self.gathered = [self._gathered(weights) for weights in of_units]
        self.sent = [self._sent(weights) for weights in of_units]
        self.root = self._gathered(of_root)
        self.last = len(units) - 1 if tied is None else 0
        """The unit after whose backward the gradients of the root are complete."""
        self.sent[self.last] += self._sent(of_root)
        self.is_root_trained = any(weight.is_trained for weight in of_root)
        self.shards = 0
        """Bytes of the shards' gradients."""
        self.has_shards = is_gloo or cfg.parallel.offload != "all"
        """Whether they stay on the device."""
        self.is_kept = not cfg.parallel.reshard_after_forward
        """Whether units stay gathered from their forward to their backward."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of these weights when they are gathered."""
        raise NotImplementedError

    def _sent(self, weights: Sequence[Weight]) -> int:
        """Return the bytes that are reduce-scattered for the gradients of these weights."""
        raise NotImplementedError

    def _in_backward(self, place: int) -> tuple[int, int]:
        """Return the gathered bytes of a unit and the root, and those of the unit below, or of
        all units below that were kept.
        """
        is_freed = self.is_root_trained and place < self.last
        root = 0 if is_freed else self.root
        below = self.gathered[:place] if self.is_kept else self.gathered[:place][-1:]
        return root + self.gathered[place], sum(below)

    def _complete(self, place: int) -> int:
        """Return the bytes of complete gradients after the backward of a unit."""
        return self.gradients[place] + (self.early if place else 0)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own, below = self._in_backward(place)
        copy = below if self.is_gloo and not self.is_kept else 0
        gradients = self.shards + self.early
        partial_sums = self._partial_sums()
        yield Held("gather", gradients, own + below + copy + partial_sums, runs=False)
        yield Held("backward", gradients + self.largest[place], own + below + partial_sums)

    def _partial_sums(self) -> int:
        """Return the bytes of what was reduce-scattered last, where it is kept."""
        return 0


class Fsdp2(Sharded):
    """parallel/fsdp2.py: each weight is gathered into a flat tensor, and copied out of it.

    In a forward the flat tensor of a unit stays until the next unit is gathered; in a backward that
    of the next unit comes early. The partial sums of a reduce-scatter stay until the next one.
    """

    sent_last = 0

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(w.padded_numel * w.itemsize for w in weights)

    def _sent(self, weights: Sequence[Weight]) -> int:
        return sum(4 * weight.padded_numel for weight in weights if weight.is_trained)

    def _partial_sums(self) -> int:
        return self.sent_last

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own, before = self.gathered[place], self.gathered[place - 1] if place else 0
        copy = own if self.is_gloo else 0
        kept = self.root + (sum(self.gathered[:place]) if self.is_kept else 0)
        yield Held("gather", self.shards, kept + before + own + copy, runs=False)
        yield Held("forward", self.shards, kept + 2 * own)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield what is held while gradients are copied and sent, and their sums come back."""
        sent = self.sent[place]
        _, below = self._in_backward(place)
        if sent:
            copy, part = sent if self.is_gloo else 0, sent // self.num_shards
            gradients = self.shards + self._complete(place)
            yield Held("reduction", gradients, below + sent, runs=False)
            yield Held("reduction", self.shards + part, below + sent + copy, runs=False)
            self.shards += part if self.is_first and self.has_shards else 0
            self.sent_last = sent
        if place == 0:
            self.sent_last = 0


class Fsdp1(Sharded):
    """parallel/fsdp1.py: the weights of a unit are views into a flat parameter."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(self._flat_bytes(flat) for flat in self._flat(weights))

    def _sent(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of all of a flat parameter of which something is trained."""
        flats = self._flat(weights)
        return sum(self._flat_bytes(flat) for flat in flats if any(w.is_trained for w in flat))

    def _flat(self, weights: Sequence[Weight]) -> list[tuple[Weight, ...]]:
        return flat_parameters(Gathered(tuple(weights), False), self.cfg.parallel.fsdp1_wrap)

    def _flat_bytes(self, flat: Sequence[Weight]) -> int:
        numel = -(-flat_spans(flat)[-1][1] // self.num_shards) * self.num_shards
        return numel * flat[0].itemsize

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own = self.root + self.gathered[place]
        copy = self.gathered[place] if self.is_gloo else 0
        yield Held("gather", self.shards, own + copy, runs=False)
        yield Held("forward", self.shards, own)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield the joining of a unit's gradients into a flat one, and its reduction."""
        sent = self.sent[place]
        if sent:
            own, below = self._in_backward(place)
            copy, part = sent if self.is_gloo else 0, sent // self.num_shards
            joined = self.shards + self._complete(place) + sent
            yield Held("reduction", joined, own + below, runs=False)
            root = own - self.gathered[place]
            yield Held("reduction", self.shards + sent + part, root + below + copy, runs=False)
            self.shards += part if self.is_first else 0


class Fsdp2Stage(Fsdp2):
    """fsdp2 in a pipeline: torch's stage keeps a step's gathered weights and complete gradients."""

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gathered = self.root + sum(self.gathered) + self.gathered[place]
        yield Held("forward", 0 if self.is_first else self.total, gathered)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gathered = self.root + sum(self.gathered)
        for held in Whole.backward(self, place):
            yield held._replace(buffers=gathered)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield from ()

    def last_reduction(self) -> Iterator[Held]:
        """Yield what is held while one unit after the other is reduced."""
        left, gathered = self.total, self.root + sum(self.gathered)
        for place in reversed(range(len(self.units))):
            sent = self.sent[place]
            copy, part = sent if self.is_gloo else 0, sent // self.num_shards
            yield Held("reduction", left, gathered + sent, runs=False)
            left -= self.gradients[place]
            yield Held("reduction", left + part, gathered + sent + copy, runs=False)
            left += part if self.has_shards else 0


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
