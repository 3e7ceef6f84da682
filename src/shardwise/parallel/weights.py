"""The weights of a rank, as the formulas of a strategy know them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from shardwise.base.layouts import shard_dim
from shardwise.config import RunConfig

if TYPE_CHECKING:
    from shardwise.models.spec import ModelSpec


@dataclass(frozen=True, eq=False)  # A search hashes millions of them.
class Weight:
    """A parameter as a rank of `tp` and `ep` holds it, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    num_shards: int
    """The data ranks that hold copies of it, or shards: of a routed expert 1/ep of them."""
    tp_dim: int | None = None
    """The dim along which `tp` shards it; None: every rank of `tp` holds all of it."""
    ep_dim: int | None = None
    """The dim along which `ep` shards it; None: it belongs to no routed expert."""
    has_partial_gradient: bool = False
    """Whether each rank of `tp` computes a partial sum of the gradient of all of it."""
    is_selected: bool = False
    """Whether the run's optimizer selects it: see `UpdateRule.selected`."""
    is_wide: bool = False
    """Whether a layer reads it in float32 where it reads copies of others in 16 bits."""
    shared_numels: tuple[int, ...] = ()
    """Elements of each of its segments of which several ranks of `tp` hold the same rows."""

    def sharded(self, num_shards: int, num_expert_ranks: int) -> Weight:
        """Return it with so many shards; those of an expert are among the ranks of its part."""
        number = num_shards if self.ep_dim is None else num_shards // num_expert_ranks
        return self if number == self.num_shards else replace(self, num_shards=number)

    @cached_property
    def numel(self) -> int:
        """Elements on a rank of `tp` and `ep`."""
        return prod(self.shape)

    @cached_property
    def shard_dim(self) -> int | None:
        """The dim that data parallelism shards, as `place.free_dim` chooses it.

        None: no dim that is not sharded divides evenly, so that each data rank holds all of it.
        """
        taken = [dim for dim in (self.tp_dim, self.ep_dim) if dim is not None]
        return shard_dim(self.shape, self.num_shards, taken)

    @cached_property
    def padded_numel(self) -> int:
        """The elements of all shards, which are equal; the last ones may be padded."""
        dim = self.shard_dim
        if dim is None:
            return self.numel
        rows = -(-self.shape[dim] // self.num_shards) * self.num_shards
        return self.numel // self.shape[dim] * rows

    def shard_numel(self, rank: int) -> int:
        """Return the elements that the rank `rank` of its shards holds, without padding."""
        dim = self.shard_dim
        if dim is None:
            return self.numel
        rows = -(-self.shape[dim] // self.num_shards)
        return self.numel // self.shape[dim] * max(0, min(rows, self.shape[dim] - rank * rows))


@dataclass(frozen=True)
class ChunkWeights:
    """The weights of a pipeline stage, or of the whole model."""

    spec: ModelSpec
    by_layer: Mapping[str, tuple[Weight, ...]]
    """The weights by the name of their layer. Those of no layer are under "start" and "end",
    without a tied one that a lower chunk of the same rank has."""
    alike: Mapping[str, str]
    """For each layer the first one of the chunk that differs from it in names only."""
    needs_input_gradient: bool
    """Whether the backward goes on to the chunk, or the embedding, below."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, in the order of the model."""
        return tuple(weight for weights in self.by_layer.values() for weight in weights)

    @cached_property
    def unlike(self) -> tuple[Weight, ...]:
        """The weights without those of a layer that is like a lower one."""
        by_layer = (ws for name, ws in self.by_layer.items() if self.alike.get(name, name) == name)
        return tuple(weight for weights in by_layer for weight in weights)

    @cached_property
    def are_gradients_few(self) -> bool:
        """Whether a rank that gathers layers keeps whole gradients: see `are_few`."""
        trained = sum(weight.numel for weight in self.weights if weight.is_trained)
        layers = (self.by_layer[layer.name] for layer in self.spec.layers)
        return are_few(4 * trained, (sum(w.itemsize * w.numel for w in ws) for ws in layers))

    @property
    def ends(self) -> tuple[Weight, ...]:
        """The weights of no layer."""
        return (*self.by_layer["start"], *self.by_layer["end"])


def is_whole_expert(weight: Weight) -> bool:
    """Return whether a weight belongs to experts of which each data rank has others."""
    return weight.ep_dim is not None and weight.num_shards == 1


def are_few(gradient_bytes: float, layer_bytes: Iterable[float]) -> bool:
    """Return whether all trained gradients, in float32, take no more than the largest layer.

    Whoever gathers one layer's weights after the other has room for them, as those of adapters:
    added up whole, they are sent once a step, and not in each micro-batch.
    """
    return gradient_bytes <= max(layer_bytes, default=0)


def gradient_bytes(cfg: RunConfig, numel: int, itemsize: int) -> int:
    """Return the bytes of gradients of so many elements, of weights of `itemsize` bytes each."""
    return numel * (4 if cfg.training.accumulation == "float32" else itemsize)


def odd_dtype(weights: Sequence[Weight]) -> set[Weight]:
    """Return the weights of another dtype than most of the elements have."""
    numels = Counter[int]()
    for weight in weights:
        numels[weight.itemsize] += weight.numel
    if len(numels) < 2:
        return set()
    most = numels.most_common(1)[0][0]
    return {weight for weight in weights if weight.itemsize != most}
