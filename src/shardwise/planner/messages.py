"""The messages of a training step, and what their number and bytes depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.layouts import context_joins_of, num_strategy_ranks
from shardwise.models.dtypes import hidden_dtype
from shardwise.planner.share import Share
from shardwise.planner.weights import Weight
from shardwise.schedule.context import MessageKind

Total = dict[tuple[str, str], tuple[int, int]]
"""(kind, mesh axis) -> calls, and bytes of their whole tensors together."""


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
    """Of a sent tensor: the place along the axis of the rank that gets it, where it is known."""
    when: When = "waited"


@dataclass(frozen=True)
class Step:
    """A training step of one rank."""

    cfg: RunConfig
    run: Description
    share: Share
    sizes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    num_microbatches: int
    num_tokens: int
    """Tokens of a micro-batch on the rank."""
    num_targets: Sequence[int]
    """Tokens with a label in each micro-batch, on the rank."""
    num_received: Mapping[str, int]
    """Rows that this rank's experts get in the step, by their path."""

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

    @property
    def hidden_numel(self) -> int:
        """The elements of a micro-batch's hidden states [B, T, D]."""
        return self.num_tokens * self.share.chunks[0].spec.hidden_size

    @property
    def hidden_bytes(self) -> int:
        """The bytes of hidden states between blocks."""
        return self.hidden_numel * hidden_dtype(self.cfg).itemsize


def sizes_of(cfg: RunConfig, run: Description) -> dict[str, int]:
    """Return the ranks along each axis of the mesh, and along those of experts."""
    num_copies = num_strategy_ranks(cfg, run.sizes) // cfg.parallel.ep
    return {**run.sizes, "dp_expert": num_copies, "ep": cfg.parallel.ep}


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


def add_up(messages: Iterable[Messages]) -> Total:
    """Return the sums of calls and bytes by kind and axis."""
    calls, num_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in messages:
        calls[message.kind, message.axis] += message.calls
        num_bytes[message.kind, message.axis] += message.num_bytes
    return {key: (number, num_bytes[key]) for key, number in calls.items() if number}
