"""The description of fully sharded data parallel on DTensor; `parallel/fsdp2.py` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig
from shardwise.parallel.gathered import ShardedHolding, units_of
from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.sent import (
    DataStep,
    Messages,
    dense_and_experts,
    float32_bytes,
    sums_over_copies,
    weight_bytes,
)
from shardwise.parallel.strategy import Strategy
from shardwise.parallel.weights import (
    ChunkWeights,
    Weight,
    gradient_bytes,
    is_whole_expert,
    odd_dtype,
)

if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh, ParallelModel
    from shardwise.models.spec import ModelSpec


HALF = 2
"""The bytes of a number of `training.precision` in 16 bits."""


class Fsdp2(Strategy):
    """A rank holds a shard of each weight, of its gradient and of its states."""

    name = "fsdp2"
    with_replicas = "hsdp"
    order = 5
    axis = "dp_shard"
    sharded = ("weights", "gradients", "optimizer")
    offloads = ("none", "optimizer", "all")
    frees_weights = True
    gathers_copies = True
    is_before_loading = True

    def apply(
        self, pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
    ) -> ParallelModel:
        """Shard a model on meta, so that no rank ever holds all of it."""
        from shardwise.parallel import fsdp2

        return fsdp2.apply(pm, mesh, cfg, spec)

    def reduces_each(self, pp: int, are_few: bool) -> bool:
        """Return whether a backward reduces gradients: few ones, and those of a stage of a
        pipeline, are reduced after the last one.
        """
        return pp == 1 and not are_few

    def left_whole(self, cfg: RunConfig, chunk: ChunkWeights) -> frozenset[Weight]:
        """See Strategy.

        They are those that have no dim to shard, experts of which each data rank has others (see
        `parallel.fsdp2.left_replicated`) and, as a collective has one dtype, those of an odd one.
        """
        itemsizes = {weight.itemsize for weight in chunk.unlike if weight.is_trained}
        has_wide = any(weight.is_wide for weight in chunk.unlike)
        if all(map(_is_divided, chunk.unlike)) and len(itemsizes) <= 1 and not has_wide:
            return frozenset()
        undivided = {weight for weight in chunk.weights if not _is_divided(weight)}
        odd = odd_dtype([weight for weight in chunk.weights if weight.is_trained])
        wide = {weight for weight in chunk.weights if weight.is_wide}
        return frozenset(undivided | odd | wide)

    def kept(self, weight: Weight, rank: int) -> tuple[int, int, int]:
        """Return a shard of all three: weight and gradient have as many rows on each rank, the last
        ones padding.
        """
        padded = weight.padded_numel // weight.num_shards
        return padded, padded, weight.shard_numel(rank)

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """See Strategy."""
        ends = [units.units[0], units.units[-1]] if chunk.spec.last else [units.units[0]]
        rest = {weight for unit in ends for weight in unit.weights if units.tied is not None}
        kind = Fsdp2Holding if units.cfg.parallel.pp == 1 else StageHolding
        if kind is Fsdp2Holding and chunk.are_gradients_few:
            kind = AtLastHolding
        return kind(units, frozenset(rest), self.left_whole(units.cfg, chunk))

    def messages(self, step: DataStep) -> Iterator[Messages]:
        """Yield, per micro-batch and unit, an all-gather for the forward and one for the backward,
        and the reduce-scatter of trained gradients, once a step where they are few; shards of them
        are summed over replicas once a step. Experts that `ep` spreads have messages of their own,
        in the same unit.

        The backward ends at the lowest unit with something trained, and has gathered the unit below
        it ahead: where the lowest unit has one message, only the last one of the unit below. In a
        pipeline gradients are reduce-scattered once a step, and a backward leaves the weights
        gathered for what comes next: they are gathered at first, and after every forward.
        """
        m, in_pipeline = step.num_microbatches, step.sizes["pp"] > 1
        for chunk in step.chunks:
            unsharded = self.left_whole(step.cfg, chunk)
            units = units_of(chunk, ends_apart=True)
            groups = [
                dense_and_experts(weight for weight in unit.weights if weight not in unsharded)
                for unit in units
            ]
            lowest = 0
            if not chunk.needs_input_gradient:
                lowest = next((i for i, unit in enumerate(units) if unit.trained), len(units) + 1)
            for i, unit in enumerate(units):
                is_freed = step.cfg.parallel.reshard_after_forward and not unit.is_kept
                for weights in groups[i]:
                    is_ahead = i == lowest - 1 and (
                        len(groups[lowest]) > 1 or weights is groups[i][-1]
                    )
                    backward_gathers = m if is_freed and (i >= lowest or is_ahead) else 0
                    stays_gathered = in_pipeline and (backward_gathers or not is_freed)
                    gathers = (1 if stays_gathered else m) + backward_gathers
                    axis = step.data_axis(weights[0])
                    num_bytes = gathers * _gathered_bytes(step.cfg, weights)
                    yield Messages("all-gather", axis, gathers, num_bytes, when="layers")
                    if trained := [weight for weight in weights if weight.is_trained]:
                        num_bytes, shard = (size := float32_bytes(trained)), size // step.size(axis)
                        times, when, at_last = m, "layers", "last backward"
                        if chunk.are_gradients_few:
                            times, when = 1, "last backward"
                        if in_pipeline:
                            times, when, at_last = 1, "waited", "waited"
                        num_bytes *= times
                        yield Messages("reduce-scatter", axis, times, num_bytes, when=when)
                        yield Messages("all-reduce", step.replica_axis, 1, shard, when=at_last)
            yield from sums_over_copies(step, unsharded)
            sharded = [weight for weight in chunk.weights if weight not in unsharded]
            yield from update_rule_of(step.cfg).messages(step, sharded)


class Fsdp2Holding(ShardedHolding):
    """parallel/fsdp2.py: each weight is gathered into a flat tensor, and copied out of it.

    In a forward the flat tensor of a unit stays until the next unit is gathered; in a backward that
    of the next unit comes early. The partial sums of a reduce-scatter stay until the next one.
    Under `accumulation: float32` shards in 16 bits are moved to float32 after each micro-batch.
    """

    sent_last = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.cfg.parallel.dp_replicate > 1:  # added up over replicas only at last, in float32
            self.kept = self.sums
        in_float32 = self.sums if self.cfg.training.accumulation == "float32" else self.kept
        self.is_moved = in_float32 != self.kept
        self.after_backward = sum(in_float32) + sum(self.whole_gradients)
        """The bytes of the shards' gradients after the backward of a micro-batch."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return _gathered_bytes(self.cfg, weights)

    def _gradient(self, weight: Weight) -> int:
        """Return the bytes of a gradient before it is reduced: that of a gathered copy."""
        if not self.cfg.training.casts_weights or weight in self.whole:
            return super()._gradient(weight)
        return weight.numel * HALF

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
            copy, part = sent if self.is_gloo else 0, self.sums[place]
            gradients = self.shards + self._complete(place)
            # On a CPU torch joins gradients of copies before it widens them.
            joined = sent // 4 * HALF if self.is_gloo and self.cfg.training.casts_weights else 0
            yield Held("reduction", gradients, below + sent + joined, runs=False)
            whole = self.whole_gradients[place] if self.is_first else 0
            yield Held("reduction", self.shards + part + whole, below + sent + copy, runs=False)
            is_new = self.is_first or self.is_moved
            self.shards += self.kept[place] if is_new and self.has_shards else 0
            self.sent_last = sent
        self.shards += self.whole_gradients[place] if self.is_first else 0
        if place == 0:
            self.sent_last = 0
            if self.is_moved and self.has_shards:
                self.shards = self.after_backward


class AtLastHolding(Fsdp2Holding):
    """fsdp2 with few gradients: they add up whole, in float32, and the last backward sends them."""

    repeats = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added = [s + w for s, w in zip(self.sent, self.whole_gradients)]
        """The bytes of a unit's whole gradients between micro-batches."""

    def _whole(self, place: int) -> int:
        """Return the bytes of whole gradients of other units as a unit runs backward."""
        above = 0 if self.is_last else sum(self.added[place + 1 :])
        return above + (0 if self.is_first else sum(self.added[: place + 1]))

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gradients = 0 if self.is_first else sum(self.added)
        for held in super().forward(place):
            yield held._replace(gradients=gradients)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        for held in super().backward(place):
            yield held._replace(gradients=held.gradients + self._whole(place))

    def reduction(self, place: int) -> Iterator[Held]:
        """See Fsdp2Holding: that of the last backward; before, new gradients are added."""
        if not self.is_last:
            return
        was_first, self.is_first = self.is_first, True  # Shards of them are new, as in a first one.
        found = [*super().reduction(place)]
        self.is_first = was_first
        for held in found:
            yield held._replace(gradients=held.gradients + self._whole(place - 1))


class StageHolding(Fsdp2Holding):
    """fsdp2 in a pipeline: torch's stage keeps complete gradients until the end of a step.

    It frees no weights after a backward. So they are there in what comes next, in which a forward
    frees one unit after the other, unless they are kept. Gradients add up in float32.
    """

    def _gradient(self, weight: Weight) -> int:
        """See Whole."""
        return gradient_bytes(self.cfg, weight.numel, weight.itemsize)

    @property
    def gathered_bytes(self) -> int:
        """See Whole."""
        return self.root + sum(self.gathered)

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gradients = 0 if self.is_first else self.total
        if self.is_gathered:
            there = self.gathered if self.is_kept else self.gathered[place:]
            yield Held("forward", gradients, self.root + sum(there))
        else:
            for held in super().forward(place):
                yield held._replace(moment="forward", gradients=gradients)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        below, copy = sum(self.gathered[:place]), 0
        if not (self.is_gathered or self.is_kept):  # it gathers one unit ahead
            below = sum(self.gathered[:place][-1:])
            copy = below if self.is_gloo else 0
        there = self.root + sum(self.gathered[place:]) + below
        for held in Whole.backward(self, place):
            yield held._replace(buffers=there + copy, runs=False)
            yield held._replace(buffers=there)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield from ()

    def last_reduction(self) -> Iterator[Held]:
        """Yield what is held while one unit after the other is reduced."""
        left, gathered = self.total, self.root + sum(self.gathered)
        for place in reversed(range(len(self.units))):
            sent = self.sent[place]
            copy, part = sent if self.is_gloo else 0, self.sums[place]
            yield Held("reduction", left, gathered + sent, runs=False)
            left -= self.gradients[place] - self.whole_gradients[place]
            yield Held("reduction", left + part, gathered + sent + copy, runs=False)
            left += self.kept[place] if self.has_shards else 0


def _gathered_bytes(cfg: RunConfig, weights: Iterable[Weight]) -> int:
    """Return the bytes of weights that a rank gathers, as they are or cast."""
    if not cfg.training.casts_weights:
        return weight_bytes(weights)
    return sum(HALF * weight.padded_numel for weight in weights)


def _is_divided(weight: Weight) -> bool:
    """Return whether each data rank has other elements of a weight, unless its dtype is odd."""
    return weight.shard_dim is not None and not is_whole_expert(weight)
