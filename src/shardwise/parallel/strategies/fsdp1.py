"""The description of PyTorch's first FSDP; `parallel/fsdp1.py` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from shardwise.config import RunConfig
from shardwise.parallel.gathered import GatheredUnit, ShardedHolding, units_of
from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.sent import DataStep, Messages, sums_over_copies
from shardwise.parallel.strategy import Elements, Strategy
from shardwise.parallel.weights import ChunkWeights, Weight, odd_dtype

if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh, ParallelModel
    from shardwise.models.spec import ModelSpec

ALIGNMENT_BYTES = 16
"""Each parameter in one of fsdp1's flat parameters starts at a multiple of so many bytes."""


class Fsdp1(Strategy):
    """A rank holds an equal piece of each flat parameter, of its gradient and of its states."""

    name = "fsdp1"
    order = 4
    axis = "dp_shard"
    sharded = ("weights", "gradients", "optimizer")
    is_searched = False
    needs_ranks = True
    is_flat = True
    unfit_for_stages = "fsdp1 is not proven in a pipeline"
    is_before_loading = True

    def apply(
        self, pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
    ) -> ParallelModel:
        """Give memory to one unit of a model on meta after the other, and shard it."""
        from shardwise.parallel import fsdp1

        return fsdp1.apply(pm, mesh, cfg, spec)

    def reduces_each(self, pp: int, are_few: bool) -> bool:
        """See Strategy."""
        return pp == 1

    def left_whole(self, cfg: RunConfig, chunk: ChunkWeights) -> frozenset[Weight]:
        """See Strategy."""
        return frozenset(chunk.weights).difference(*self._flat(cfg, chunk))

    def _flat(self, cfg: RunConfig, chunk: ChunkWeights) -> Iterator[tuple[Weight, ...]]:
        for unit in units_of(chunk, ends_apart=False):
            yield from flat_parameters(unit, cfg.parallel.fsdp1_wrap)

    def held(
        self, cfg: RunConfig, chunk: ChunkWeights, num_shards: int, rank: int
    ) -> Iterator[tuple[int, Elements]]:
        """Yield what is whole, and the equal piece that a rank has of each flat parameter.

        The gradient of a flat parameter with something trained in it is as large as the piece.
        States are those of the trained elements that lie in the piece, and a counter for each
        weight, also where none of it does.
        """
        for weight in self.left_whole(cfg, chunk):
            yield 1, Elements.of(weight, weight.numel, weight.numel, weight.numel)
        for weights in self._flat(cfg, chunk):
            spans, itemsize = flat_spans(weights), weights[0].itemsize
            piece = -(-spans[-1][1] // num_shards)
            yield 1, Elements(itemsize, piece, piece if _is_trained(weights) else 0)
            for weight, (start, end) in zip(weights, spans, strict=True):
                overlap = min(end, (rank + 1) * piece) - max(start, rank * piece)
                if weight.is_trained:
                    yield 1, Elements(itemsize, 0, 0, max(0, overlap))

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """See Strategy."""
        rest = [*units.units[0].weights] if units.tied else []
        rest += units.units[-1].weights if chunk.spec.last else ()
        return Fsdp1Holding(units, frozenset(rest))

    def messages(self, step: DataStep) -> Iterator[Messages]:
        """Yield, per micro-batch, what fsdp2 sends, of flat parameters.

        A unit with nothing trained in it or below is not gathered for a backward, nor is the outer
        flat parameter of the root, which stays gathered.
        """
        n, m = step.size(step.shard_axis), step.num_microbatches
        (chunk,) = step.chunks
        has_backward = False
        for unit in units_of(chunk, ends_apart=False):
            has_backward = has_backward or bool(unit.trained)
            flat = flat_parameters(unit, step.cfg.parallel.fsdp1_wrap)
            for weights in flat:
                is_kept = unit.is_kept and weights is flat[-1]
                gathers = 2 * m if has_backward and not is_kept else m
                numel = -(-flat_spans(weights)[-1][1] // n) * n
                num_bytes = numel * weights[0].itemsize
                num_bytes *= gathers
                yield Messages("all-gather", step.shard_axis, gathers, num_bytes, when="layers")
                if any(weight.is_trained for weight in weights):
                    yield Messages(
                        "reduce-scatter", step.shard_axis, m, m * 4 * numel, when="layers"
                    )
        yield from sums_over_copies(step, self.left_whole(step.cfg, chunk))


class Fsdp1Holding(ShardedHolding):
    """parallel/fsdp1.py: the weights of a unit are views into a flat parameter.

    Its gradient is reduced in float32, and the shard of it gets the dtype of the weights.
    """

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(self._flat_bytes(flat) for flat in self._flat(weights))

    def _sent(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of all of a flat parameter of which something is trained."""
        return sum(4 * self._numel(flat) for flat in self._flat(weights) if _is_trained(flat))

    def _kept(self, weights: Sequence[Weight]) -> int:
        joined = sum(self._flat_bytes(flat) for flat in self._flat(weights) if _is_trained(flat))
        return joined // self.num_shards

    def _flat(self, weights: Iterable[Weight]) -> list[tuple[Weight, ...]]:
        return flat_parameters(GatheredUnit(tuple(weights), False), self.cfg.parallel.fsdp1_wrap)

    def _flat_bytes(self, flat: Sequence[Weight]) -> int:
        return self._numel(flat) * flat[0].itemsize

    def _numel(self, flat: Sequence[Weight]) -> int:
        return -(-flat_spans(flat)[-1][1] // self.num_shards) * self.num_shards

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
            joined = self.kept[place] * self.num_shards
            # What autograd has joined in 16 bits lies beside what is sent in float32.
            cast = joined if sent > joined else 0
            complete = self.shards + cast + sent
            yield Held("reduction", complete + self._complete(place), own + below, runs=False)
            root = own - self.gathered[place]
            yield Held("reduction", complete + part, root + below + copy, runs=False)
            self.shards += self.kept[place] if self.is_first else 0


def flat_parameters(
    unit: GatheredUnit, wrap: Literal["separate", "naive"]
) -> list[tuple[Weight, ...]]:
    """Return the weights of each flat parameter that fsdp1 makes of a unit, without those of an odd
    dtype, which stay whole.

    `separate`: what a unit trains lies in a flat parameter of its own.
    """
    frozen = tuple(weight for weight in unit.weights if not weight.is_trained)
    groups = [unit.trained, frozen] if wrap == "separate" else [unit.weights]
    return [_of_one_dtype(group) for group in groups if group]


def _of_one_dtype(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    odd = odd_dtype(weights)
    return tuple(weight for weight in weights if weight not in odd)


def flat_spans(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return where each weight lies in its flat parameter: (start, end), in elements."""
    spans, end = [], 0
    for weight in weights:
        step = max(1, ALIGNMENT_BYTES // weight.itemsize)
        start = -(-end // step) * step
        end = start + weight.numel
        spans.append((start, end))
    return spans


def _is_trained(flat: Sequence[Weight]) -> bool:
    return any(weight.is_trained for weight in flat)
