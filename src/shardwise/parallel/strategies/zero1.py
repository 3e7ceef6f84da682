"""The description of ZeRO's first stage; `parallel/zero.py` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.config import RunConfig
from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.sent import (
    DataStep,
    Messages,
    dense_and_experts,
    float32_bytes,
    num_dtypes,
    sums_over_copies,
    weight_bytes,
)
from shardwise.parallel.strategy import Strategy
from shardwise.parallel.weights import ChunkWeights, Weight

if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh, ParallelModel
    from shardwise.models.spec import ModelSpec


class Zero1(Strategy):
    """Every rank holds all weights, and a shard of the optimizer's states."""

    name = "zero1"
    order = 2
    sharded = ("gradients", "optimizer")
    shares = "the optimizer's states; each has other rows"

    def apply(
        self, pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
    ) -> ParallelModel:
        """See Strategy."""
        from shardwise.parallel import zero

        return zero.apply(pm, mesh, self.reduces_each(cfg.parallel.pp, are_few=False))

    def left_whole(self, cfg: RunConfig, chunk: ChunkWeights) -> frozenset[Weight]:
        """See Strategy."""
        if all(weight.shard_dim is not None for weight in chunk.unlike):
            return frozenset()
        return frozenset(weight for weight in chunk.weights if weight.shard_dim is None)

    def kept(self, weight: Weight, rank: int) -> tuple[int, int, int]:
        """See Strategy."""
        shard = weight.shard_numel(rank)
        return weight.numel, shard, shard

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """See Strategy."""
        return Zero1Holding(units)

    def after_update(self, trained: Sequence[Weight], is_gloo: bool) -> Iterator[int]:
        """Yield the bytes of a rank's updated shards of a bucket, and of all shards of it."""
        for bucket in buckets(trained[::-1]):
            size = sum(w.padded_numel * w.itemsize for w in bucket)
            copy = size if is_gloo else 0
            yield size // bucket[0].num_shards + size + copy

    def messages(self, step: DataStep) -> Iterator[Messages]:
        """Yield the reduce-scatter of trained gradients, once a step or, in stage 2, a micro-batch,
        and the all-gather of the updated weights, one of each for each dtype of weights.
        """
        is_in_each = self.reduces_each(step.cfg.parallel.pp, are_few=False)
        times = step.num_microbatches if is_in_each else 1
        sharded = [weight for weight in step.trained if weight.shard_dim is not None]
        for weights in dense_and_experts(sharded):
            axis, calls = step.data_axis(weights[0]), num_dtypes(weights)
            num_bytes = times * float32_bytes(weights)
            yield Messages("reduce-scatter", axis, times * calls, num_bytes)
            yield Messages("all-gather", axis, calls, weight_bytes(weights))
        unsharded = [weight for weight in step.trained if weight.shard_dim is None]
        yield from sums_over_copies(step, unsharded)


class Zero1Holding(Whole):
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
        self.reduced = left + shards

    def _of_shards(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of a rank's gradients of shards of these weights."""
        return sum(self._gradient(w) // w.num_shards for w in weights)

    def _scattered(self, bucket: Sequence[Weight], gradients: int) -> Iterator[Held]:
        sent = self._sent(bucket)
        freed = gradients - sum(map(self._gradient, bucket))
        copy = sent if self.is_gloo else 0
        yield Held("reduction", gradients, sent, runs=False)
        yield Held("reduction", freed, sent + copy + self._summed(bucket), runs=False)


def buckets(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Return the buckets of at most BUCKET_BYTES that zero makes of the weights that are sharded.

    Weights of another dtype have buckets of their own, and so have experts that `ep` spreads.
    """
    from shardwise.parallel.zero import BUCKET_BYTES

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
