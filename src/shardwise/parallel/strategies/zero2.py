"""The description of ZeRO's second stage; `parallel/zero.py` does it."""

from collections.abc import Iterator
from typing import Any

from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.strategies.zero1 import Zero1, Zero1Holding, buckets
from shardwise.parallel.weights import ChunkWeights, Weight


class Zero2(Zero1):
    """A rank holds a shard of the gradients, too, which each backward reduces."""

    name = "zero2"
    order = 3
    unfit_for_stages = "zero2 reduces gradients in every backward, which schedules may halve"
    takes_late_sums = False
    shares = "the optimizer's states and gradients; each has other rows"

    def reduces_each(self, pp: int, are_few: bool) -> bool:
        """See Strategy."""
        return True

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """See Strategy."""
        return Zero2Holding(units)


class Zero2Holding(Zero1Holding):
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
