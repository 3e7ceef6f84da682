"""The base of a data-parallel strategy: what it does, and what ranks hold and send under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwise.base.layouts import StrategyFacts
from shardwise.config import RunConfig
from shardwise.parallel.holding import ChunkUnits, Whole
from shardwise.parallel.sent import DataStep, Messages
from shardwise.parallel.weights import ChunkWeights, Weight

if TYPE_CHECKING:
    from shardwise.base.interfaces import Mesh, ParallelModel
    from shardwise.models.spec import ModelSpec


class Elements(NamedTuple):
    """The elements that a rank holds of a weight, or of several that lie in a flat parameter."""

    itemsize: int
    weights: int
    gradients: int = 0
    states: int | None = None
    """Elements of each state of the optimizer; None: it has none, not even a counter of steps."""
    is_selected: bool = False
    """Whether the run's optimizer selects the weight."""

    @classmethod
    def of(cls, weight: Weight, numel: int, gradient: int, state: int) -> Elements:
        """Return those of a weight; gradient and states count where it is trained."""
        if not weight.is_trained:
            return cls(weight.itemsize, numel)
        return cls(weight.itemsize, numel, gradient, state, weight.is_selected)


class Strategy(StrategyFacts):
    """A data-parallel strategy. This one leaves every rank the whole model, and sends nothing."""

    is_before_loading: bool = False
    """Whether it is applied to a model on meta, so that weights are loaded into its shards."""

    def is_requested(self, cfg: RunConfig) -> bool:
        """Return whether a run is under it."""
        return cfg.parallel.data == self.name

    def apply(
        self, pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
    ) -> ParallelModel:
        """Return the model of a rank under it."""
        return pm

    def reduces_each(self, pp: int, are_few: bool) -> bool:
        """Return whether each backward of a stage, of `pp`, reduces gradients, so that shards of
        them add up; `are_few`: see `parallel.weights.are_few`.
        """
        return False

    def sums_at_last(self, cfg: RunConfig, itemsizes: Iterable[int]) -> bool:
        """Return whether copies of gradients are summed after the last backward of a step.

        `itemsizes`: bytes of an element of each trained weight.
        """
        return False

    def left_whole(self, cfg: RunConfig, chunk: ChunkWeights) -> frozenset[Weight]:
        """Return the weights of which every data rank holds all, with gradients and states."""
        return frozenset(chunk.weights)

    def kept(self, weight: Weight, rank: int) -> tuple[int, int, int]:
        """Return the elements of a weight, of its gradient and of each state that the rank `rank`
        of its shards holds between steps, of a weight that is not left whole.
        """
        raise NotImplementedError

    def held(
        self, cfg: RunConfig, chunk: ChunkWeights, num_shards: int, rank: int
    ) -> Iterator[tuple[int, Elements]]:
        """Yield the elements that rank `rank` of the strategy holds of weights between steps, each
        with the number of layers that are alike.

        Neighbours along `ep` have other experts, so each has the same shard of its own.
        """
        whole, times = self.left_whole(cfg, chunk), Counter(chunk.alike.values())
        for name, weights in chunk.by_layer.items():
            if chunk.alike.get(name, name) == name:
                for weight in weights:
                    elements = (weight.numel,) * 3
                    if weight not in whole:
                        shard = rank if weight.ep_dim is None else rank // cfg.parallel.ep
                        elements = self.kept(weight, shard)
                    yield times.get(name, 1), Elements.of(weight, *elements)

    def holding(self, chunk: ChunkWeights, units: ChunkUnits) -> Whole:
        """Return what is held of gradients and buffers at each moment of a micro-batch."""
        return Whole(units)

    def after_update(self, trained: Sequence[Weight], is_gloo: bool) -> Iterator[int]:
        """Yield the bytes of the buffers in which updated weights are gathered, in turn."""
        yield from ()

    def messages(self, step: DataStep) -> Iterator[Messages]:
        """Yield what it sends in a training step."""
        yield from ()
