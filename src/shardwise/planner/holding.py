"""What data parallelism holds of gradients and buffers at each moment of a micro-batch.

A class here mirrors a file of `parallel/`; those of FSDP are in `holding_fsdp.py`. It knows nothing
of activations, which `peak.py` adds. Where the file says "copy", gloo copies what a collective
gathers or scatters, and NCCL does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from shardwise.assembly.costs import gradient_bytes
from shardwise.config import RunConfig
from shardwise.models.activations import UnitMemory
from shardwise.parallel.zero import BUCKET_BYTES
from shardwise.planner.weights import Weight


@dataclass(frozen=True)
class Unit:
    """The embedding, a layer, or final norm and head, as a rank holds it."""

    name: str
    memory: UnitMemory
    weights: tuple[Weight, ...]

    @cached_property
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

    repeats = False
    """Whether every micro-batch after the first one is like the second."""

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
        self.is_gathered = False
        """Whether the weights of all units are there as an action of a pipeline begins."""

    @property
    def gathered_bytes(self) -> int:
        """The bytes of gathered weights between actions of a pipeline, if they are there."""
        return 0

    def _gradient(self, weight: Weight) -> int:
        return gradient_bytes(self.cfg, weight.numel, weight.itemsize)

    def _sent(self, weights: Iterable[Weight]) -> int:
        """Return the bytes that are reduce-scattered for the gradients of these weights."""
        return sum(4 * weight.padded_numel for weight in weights if weight.is_trained)

    def _summed(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of a rank's part of their sums, in float32: 1/n of what is sent."""
        return sum(4 * w.padded_numel // w.num_shards for w in weights if w.is_trained)

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

    def between(self, moment: str) -> Held:
        """Return what is held in a half of a backward: no new gradient, all weights."""
        gradients = 0 if self.is_first else self.total
        return Held(moment, gradients, self.gathered_bytes, runs=moment == "backward")


class Ddp(Whole):
    """Buckets hold a gradient of every weight, also between steps (parallel/ddp.py).

    Micro-batches before the last have gradients of their own beside them. In the last one a
    gradient is copied into its bucket and freed as soon as it is there. A bucket in 16 bits is
    summed as a copy in float32. One copy is counted; where links are slower than the backward there
    are more.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        in_16_bits = [[w for w in unit.trained if w.itemsize < 4] for unit in self.units]
        sizes = [sum(map(self._gradient, of_unit)) for of_unit in in_16_bits]
        self.filled = [*accumulate(reversed(sizes), initial=0)][::-1]
        """The bytes of gradients in 16 bits of each unit and of those above it; 0 above all."""

    def _copied(self, place: int) -> int:
        """Return the bytes of the copy that is summed as the backward of a unit fills a bucket."""
        filled, above = self.filled[place : place + 2]
        is_full = place == 0 or filled // BUCKET_BYTES > above // BUCKET_BYTES
        return 2 * min(BUCKET_BYTES, filled) if is_full else 0

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
        elif copied := self._copied(place):
            left = 0 if self.is_first else sum(self.gradients[:place])
            yield Held("reduction", left + self.early, self.total + copied, runs=False)


class Zero1(Whole):
    """Complete gradients add up, and buckets of them are reduced after the last backward.

    A bucket is copied into a buffer in float32 and freed; its sum is 1/n of it (parallel/zero.py).
    """

    def last_reduction(self) -> Iterator[Held]:
        """See Whole."""
        left, shards = self.total, 0
        for bucket in buckets([w for unit in self.units[::-1] for w in unit.trained[::-1]]):
            yield from self._scattered(bucket, left + shards)
            left -= sum(map(self._gradient, bucket))
            shards += self._of_shards(bucket)

    def _of_shards(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of a rank's gradients of shards of these weights."""
        return sum(self._gradient(w) // w.num_shards for w in weights)

    def _scattered(self, bucket: Sequence[Weight], gradients: int) -> Iterator[Held]:
        sent = self._sent(bucket)
        freed = gradients - sum(map(self._gradient, bucket))
        copy = sent if self.is_gloo else 0
        yield Held("reduction", gradients, sent, runs=False)
        yield Held("reduction", freed, sent + copy + self._summed(bucket), runs=False)


class Zero2(Zero1):
    """Buckets are reduced in each backward, as soon as they are full.

    The buffer and the sum of a bucket stay until the next one is full: those of the last bucket
    through the forward of the next micro-batch, too (parallel/zero.py).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        places = {w: place for place, unit in enumerate(self.units) for w in unit.trained}
        self.ready: dict[int, list[list[Weight]]] = {}
        """The buckets that the backward of a unit completes, by its place."""
        for bucket in buckets([w for unit in self.units[::-1] for w in unit.trained[::-1]]):
            self.ready.setdefault(places[bucket[-1]], []).append(bucket)
        self.shards = self.pending = 0
        """Bytes of the shards' gradients, and of those that wait for the rest of their bucket."""
        self.sending = self.new_shards = 0
        """Bytes of the buffers of the last bucket, and of the shards' gradients it will leave."""

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield Held("forward", self.shards, self.sending)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gradients = self.shards + self.pending + self.early
        yield Held("backward", gradients + self.largest[place], self.sending)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        self.pending += self.gradients[place]
        for bucket in self.ready.get(place, ()):
            self.shards += self.new_shards
            yield Held("reduction", self.shards + self.pending, self.sending, runs=False)
            yield from self._scattered(bucket, self.shards + self.pending)
            self.pending -= sum(map(self._gradient, bucket))
            self.sending = self._sent(bucket) + self._summed(bucket)
            self.new_shards = self._of_shards(bucket) if self.is_first else 0

    def last_reduction(self) -> Iterator[Held]:
        """See Whole."""
        yield from ()


def buckets(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Return the buckets of at most BUCKET_BYTES that zero makes of the weights that are sharded.

    Weights of another dtype have buckets of their own, and so have experts that `ep` spreads.
    """
    made: list[list[Weight]] = []
    filling: dict[tuple[int, bool], tuple[list[Weight], int]] = {}
    for weight in weights:
        if weight.shard_dim is None:
            continue
        key = weight.itemsize, weight.ep_dim is None
        bucket, size = filling.get(key, ([], 0))
        size += weight.numel * weight.itemsize
        if not bucket or size > BUCKET_BYTES:
            bucket, size = [], weight.numel * weight.itemsize
            made.append(bucket)
        bucket.append(weight)
        filling[key] = bucket, size
    return made
