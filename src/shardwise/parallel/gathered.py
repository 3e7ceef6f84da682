"""Parts that fsdp1 and fsdp2 share: units of weights that are gathered together, and what they
take.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwise.parallel.holding import ChunkUnits, Held, Whole
from shardwise.parallel.weights import ChunkWeights, Weight


@dataclass(frozen=True)
class GatheredUnit:
    """Weights that are gathered and freed together."""

    weights: tuple[Weight, ...]
    is_kept: bool
    """Whether it stays gathered from the forward to the backward, which follows at once."""

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


def units_of(chunk: ChunkWeights, ends_apart: bool) -> list[GatheredUnit]:
    """Return the units of a chunk, in forward order.

    They are the embedding, each layer, and the rest: final norm, head, and a tied embedding, which
    is used at both ends. With `ends_apart` norm and head are a unit of their own, unless tied.
    """
    spec, rest = chunk.spec, "rest"
    has_ends = ends_apart and spec.last and not spec.tied
    others: dict[str, list[Weight]] = {spec.embed: [], spec.head: [], rest: []}
    for weight in chunk.ends:
        unit = rest
        if not spec.tied and weight.name.startswith(f"{spec.embed}."):
            unit = spec.embed
        elif has_ends and weight.name.startswith((f"{spec.norm}.", f"{spec.head}.")):
            unit = spec.head
        others[unit].append(weight)
    units = [
        GatheredUnit(tuple(others[spec.embed]), is_kept=False),
        *(GatheredUnit(chunk.by_layer[layer.name], is_kept=False) for layer in spec.layers),
        GatheredUnit(tuple(others[spec.head]), is_kept=True),
        GatheredUnit(tuple(others[rest]), is_kept=spec.tied or not ends_apart),
    ]
    return [unit for unit in units if unit.weights]


class ShardedHolding(Whole):
    """Fully sharded data parallelism, which gathers a unit's weights for its forward and backward.

    In a backward the weights of the next unit come while one runs, and its gradients are
    reduce-scattered when it has ended. The root has the weights that are no unit's (`rest`). They
    are gathered for the complete forward, and until their gradients are reduced. Of others a rank
    has all (`whole`), with their gradients: experts that `ep` spreads over all shards, above all.
    """

    repeats = True

    def __init__(
        self, units: ChunkUnits, rest: Collection[Weight] = (), whole: Collection[Weight] = ()
    ) -> None:
        self.whole = frozenset(whole)
        super().__init__(units)
        sharded = [[w for w in unit.weights if w not in whole] for unit in self.units]
        root_weights = [weight for weights in sharded for weight in weights if weight in rest]
        unit_weights = [[w for w in weights if w not in rest] for weights in sharded]
        self.gathered = [self._gathered(weights) for weights in unit_weights]
        self.sent = [self._sent(weights) for weights in unit_weights]
        self.root = self._gathered(root_weights)
        self.last = len(self.units) - 1 if self.tied is None else 0
        """The unit after whose backward the gradients of the root are complete."""
        self.sent[self.last] += self._sent(root_weights)
        self.sums = [self._summed(weights) for weights in unit_weights]
        """The bytes of a rank's part of the sums of a unit's gradients."""
        self.sums[self.last] += self._summed(root_weights)
        self.kept = [self._kept(weights) for weights in unit_weights]
        """The bytes that stay of them: a rank's shards of a unit's gradients."""
        self.kept[self.last] += self._kept(root_weights)
        self.whole_gradients = [
            sum(self._gradient(w) for w in unit.trained if w in whole) for unit in self.units
        ]
        """The bytes of the gradients of weights of which a rank has all."""
        self.is_root_trained = any(weight.is_trained for weight in root_weights)
        self.shards = 0
        """Bytes of the shards' gradients."""
        self.has_shards = self.is_gloo or self.cfg.parallel.offload != "all"
        """Whether they stay on the device."""
        self.is_kept = not self.cfg.parallel.reshard_after_forward
        """Whether units stay gathered from their forward to their backward."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of these weights when they are gathered."""
        raise NotImplementedError

    def _kept(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of the shards of these weights' gradients, in the weights' dtype."""
        trained = [weight for weight in weights if weight.is_trained]
        return sum(w.padded_numel // w.num_shards * w.itemsize for w in trained)

    def _in_backward(self, place: int) -> tuple[int, int]:
        """Return the gathered bytes of a unit and the root, and those of the unit below, or of
        all units below that were kept.
        """
        is_freed = self.is_root_trained and place < self.last
        root = 0 if is_freed else self.root
        below = self.gathered[:place] if self.is_kept else self.gathered[:place][-1:]
        return root + self.gathered[place], sum(below)

    def _complete(self, place: int) -> int:
        """Return the bytes of new complete gradients after the backward of a unit."""
        added = 0 if self.is_first else self.whole_gradients[place]
        return self.gradients[place] - added + (self.early if place else 0)

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
