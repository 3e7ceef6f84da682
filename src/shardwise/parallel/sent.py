"""The messages of a training step, and what those of data parallelism depend on."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwise.base.layouts import context_joins_of
from shardwise.base.schedule.context import MessageKind
from shardwise.config import RunConfig
from shardwise.parallel.weights import ChunkWeights, Weight

When = Literal["waited", "layers", "last backward"]
"""When messages of data parallelism are under way: beside every layer, beside the backward of the
last micro-batch, or while nothing is computed."""


@dataclass(frozen=True)
class Messages:
    """Collectives of one kind over one mesh axis, and the bytes of their whole tensors together."""

    kind: MessageKind
    axis: str
    calls: int
    num_bytes: int
    receiver: int | None = None
    """The place of a sent tensor along the axis of the rank that gets it, where it is known."""
    when: When = "waited"


@dataclass(frozen=True)
class DataStep:
    """A training step of one rank, as far as a data-parallel strategy asks."""

    cfg: RunConfig
    chunks: tuple[ChunkWeights, ...]
    trained: tuple[Weight, ...]
    """The weights of all chunks that the optimizer updates."""
    sizes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    num_microbatches: int

    @property
    def replica_axis(self) -> str:
        """The axis of ddp's and ZeRO's ranks, as Mesh.replica_axis."""
        return joined_axis(self.cfg, "dp_replicate", self.sizes)

    @property
    def shard_axis(self) -> str:
        """The axis of FSDP's ranks, as Mesh.shard_axis."""
        return joined_axis(self.cfg, "dp_shard", self.sizes)

    def copy_axes(self, weight: Weight) -> tuple[str, str]:
        """Return the axes whose ranks have copies, or shards, of a weight, as Mesh.copy_axes."""
        if weight.ep_dim is None:
            return self.replica_axis, self.shard_axis
        if context_joins_of(self.cfg) == "dp_shard":
            return self.replica_axis, "dp_expert"
        return "dp_expert", self.shard_axis

    def data_axis(self, weight: Weight) -> str:
        """Return the axis that a weight is sharded over, as Mesh.data_axis."""
        return self.copy_axes(weight)[context_joins_of(self.cfg) == "dp_shard"]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, which may be a joined one."""
        return ranks_along(axis, self.sizes)


def joined_axis(cfg: RunConfig, axis: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a data axis together with `cp`, if `cp` joins it."""
    if sizes["cp"] == 1 or axis != context_joins_of(cfg):
        return axis
    return f"{axis}_cp" if sizes[axis] > 1 else "cp"


def ranks_along(axis: str, sizes: Mapping[str, int]) -> int:
    """Return the number of ranks along an axis, which may be a joined one."""
    return prod(sizes[part] for part in parts_of(axis))


def parts_of(axis: str) -> tuple[str, ...]:
    """Return the axes that an axis is made of: itself, or the two of a joined one."""
    return (axis.removesuffix("_cp"), "cp") if axis.endswith("_cp") else (axis,)


def sums_over_copies(step: DataStep, weights: Iterable[Weight]) -> Iterator[Messages]:
    """Yield the sums of trained gradients over all ranks with the same part of them, once a step.

    Those of dense weights have one message for each axis, those of experts another.
    """
    for trained in dense_and_experts(weight for weight in weights if weight.is_trained):
        for axis in step.copy_axes(trained[0]):
            yield Messages("all-reduce", axis, 1, sum(4 * weight.numel for weight in trained))


def dense_and_experts(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Return the weights that `ep` leaves whole, and those of experts, which go by themselves.

    The first weight's group comes first, as where torch gathers a unit.
    """
    groups: dict[bool, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.ep_dim is None, []).append(weight)
    return [*groups.values()]


def num_dtypes(weights: Iterable[Weight]) -> int:
    """Return how many dtypes weights have; those of two dtypes share no bucket."""
    return len({weight.itemsize for weight in weights})


def weight_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights, each padded to equal shards, in its dtype."""
    return sum(weight.itemsize * weight.padded_numel for weight in weights)


def float32_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of the weights' gradients in float32, each padded to equal shards."""
    return sum(4 * weight.padded_numel for weight in weights)
