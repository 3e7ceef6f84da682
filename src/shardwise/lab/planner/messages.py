"""The messages of a training step, and the share of a model that they depend on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.assembly.describe import Description
from shardwise.base.layouts import num_strategy_ranks
from shardwise.config import RunConfig
from shardwise.models.dtypes import hidden_dtype
from shardwise.parallel.sent import DataStep, Messages
from shardwise.parallel.strategies import strategy_of
from shardwise.parallel.weights import ChunkWeights, Weight

Total = dict[tuple[str, str], tuple[int, int]]
"""(kind, mesh axis) -> calls, and bytes of their whole tensors together."""


@dataclass(frozen=True)
class ChunkShare(ChunkWeights):
    """A pipeline stage, or the whole model, with all that its layers send."""

    needs_head_gradient: bool
    """Whether the backward needs the gradient of the head's input."""
    sending: Mapping[str, tuple[Any, ...]]
    """The parts of its layers that make a rank send, by the axis."""
    receives_from: int | None = None
    """The place along `pp` of the other rank that its input comes from; None: from none."""
    sends_to: int | None = None
    """The place along `pp` of the other rank that its output goes to; None: to none."""


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank holds."""

    chunks: tuple[ChunkShare, ...]
    tied: Weight | None
    """The trained tied weight, where the stage at the other end of the pipeline has it too."""
    context_rank: int = 0
    """The place of the rank along `cp`."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of all chunks."""
        return tuple(weight for chunk in self.chunks for weight in chunk.weights)

    @cached_property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


@dataclass(frozen=True)
class Step(DataStep):
    """A training step of one rank, with what other axes than those of data send."""

    run: Description
    share: Share
    num_tokens: int
    """Tokens of a micro-batch on the rank."""
    num_targets: Sequence[int]
    """Tokens with a label in each micro-batch, on the rank."""
    num_received: Mapping[str, int]
    """Rows that this rank's experts get in the step, by their path."""

    @property
    def hidden_numel(self) -> int:
        """The elements of a micro-batch's hidden states [B, T, D]."""
        return self.num_tokens * self.share.chunks[0].spec.hidden_size

    @property
    def hidden_bytes(self) -> int:
        """The bytes of hidden states between blocks."""
        return self.hidden_numel * hidden_dtype(self.cfg).itemsize

    def num_pieces(self, weight: Weight, part: str = "weights") -> int:
        """Return into how many shards data parallelism has cut a weight, or another part of it."""
        is_cut = part in strategy_of(self.cfg).sharded and weight.shard_dim is not None
        return weight.num_shards if is_cut else 1


def sizes_of(cfg: RunConfig, run: Description) -> dict[str, int]:
    """Return the ranks along each axis of the mesh, and along those of experts."""
    num_copies = num_strategy_ranks(cfg, run.sizes) // cfg.parallel.ep
    return {**run.sizes, "dp_expert": num_copies, "ep": cfg.parallel.ep}


def add_up(messages: Iterable[Messages]) -> Total:
    """Return the sums of calls and bytes by kind and axis."""
    calls, num_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in messages:
        calls[message.kind, message.axis] += message.calls
        num_bytes[message.kind, message.axis] += message.num_bytes
    return {key: (number, num_bytes[key]) for key, number in calls.items() if number}
