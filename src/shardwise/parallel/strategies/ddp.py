"""The description of distributed data parallel; `parallel/ddp.py` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig
from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.sent import DataStep, Messages, num_dtypes, sums_over_copies
from shardwise.parallel.strategy import Strategy
from shardwise.parallel.weights import ChunkWeights

if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh, ParallelModel
    from shardwise.models.spec import ModelSpec


class Ddp(Strategy):
    """Every rank holds all weights, and gradients are summed once a step."""

    name = "ddp"
    order = 1
    offloads = ("none", "optimizer", "disk")

    def apply(
        self, pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
    ) -> ParallelModel:
        """See Strategy."""
        from shardwise.parallel import ddp

        return ddp.apply(pm, mesh, cfg, spec)

    def sums_at_last(self, cfg: RunConfig, itemsizes: Iterable[int]) -> bool:
        """Return whether torch's wrapper does not add up gradients."""
        from shardwise.parallel.ddp import is_wrapped

        return not is_wrapped(cfg, itemsizes)

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """See Strategy."""
        trained = [weight.itemsize for weight in chunk.weights if weight.is_trained]
        kind = Whole if self.sums_at_last(units.cfg, trained) else DdpHolding
        return kind(units)

    def messages(self, step: DataStep) -> Iterator[Messages]:
        """Yield the sums of all trained gradients, once a step.

        By torch's wrapper they are one for each dtype of weights, while the last backward runs.
        """
        if self.sums_at_last(step.cfg, (weight.itemsize for weight in step.trained)):
            yield from sums_over_copies(step, step.trained)
            return
        num_bytes = sum(4 * weight.numel for weight in step.trained)
        calls = num_dtypes(step.trained)
        yield Messages("all-reduce", step.replica_axis, calls, num_bytes, when="last backward")


class DdpHolding(Whole):
    """Buckets hold a gradient of every weight, also between steps (parallel/ddp.py).

    Micro-batches before the last have gradients of their own beside them. In the last one a
    gradient is copied into its bucket and freed as soon as it is there. A bucket in 16 bits is
    summed as a copy in float32. One copy is counted; where links are slower than the backward there
    are more.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from shardwise.parallel.zero import BUCKET_BYTES

        self.bucket_bytes = BUCKET_BYTES
        in_16_bits = [[w for w in unit.trained if w.itemsize < 4] for unit in self.units]
        sizes = [sum(map(self._gradient, unit_weights)) for unit_weights in in_16_bits]
        self.filled = [*accumulate(reversed(sizes), initial=0)][::-1]
        """The bytes of gradients in 16 bits of each unit and of those above it; 0 above all."""

    def _copied(self, place: int) -> int:
        """Return the bytes of the copy that is summed as the backward of a unit fills a bucket."""
        filled, above = self.filled[place : place + 2]
        is_full = place == 0 or filled // self.bucket_bytes > above // self.bucket_bytes
        return 2 * min(self.bucket_bytes, filled) if is_full else 0

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
