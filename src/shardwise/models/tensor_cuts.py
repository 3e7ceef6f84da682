"""The words in which a block, a mixer or a feed-forward of a layer, says how it is cut over tensor-parallel ranks.

A block takes hidden states [B, T, D] that are equal on every rank. With its share of the weights, each rank computes a
summand of the block's output; only the output is added up. So whatever lies between, a state, a gate, a router, an
adapter's factor, needs no reduction of its own, as long as a rank can compute its share without the others'; weights
that every rank holds whole get a summand of their gradient on each.
Source of the scheme: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


class Indivisible(ValueError):
    """What cannot be cut into so many shares: "4 key/value heads"."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows that are cut into equal shares, one after the other.

    With fewer shares than ranks, neighbours hold the same one (with 1, all hold all of it): such as a key/value head
    that the query heads of several ranks attend to. Each then has a summand of its gradient.
    """

    size: int
    shares: int


@dataclass(frozen=True)
class Rows:
    """A dim of a weight as consecutive segments; a rank holds its share of each, one after the other."""

    num_ranks: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for segment in self.segments:
            assert segment.size % segment.shares == 0, segment
            assert self.num_ranks % segment.shares == 0, segment

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(segment.size for segment in self.segments)

    @property
    def local_size(self) -> int:
        """Of what a rank holds."""
        return sum(segment.size // segment.shares for segment in self.segments)

    @property
    def in_order(self) -> bool:
        """The ranks' shares, joined in rank order, are the whole dim as it was."""
        return len(self.segments) == 1 and not self.shared

    @property
    def shared(self) -> bool:
        """Some rows are held by more than one rank."""
        return any(segment.shares < self.num_ranks for segment in self.segments)

    @property
    def num_shared(self) -> int:
        """Rows of a rank that others hold too."""
        return sum(segment.size // segment.shares for segment in self.segments if segment.shares < self.num_ranks)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """(start, length) of a rank's rows in the whole dim."""
        starts = accumulate((segment.size for segment in self.segments), initial=0)
        lengths = [segment.size // segment.shares for segment in self.segments]
        places = [rank * segment.shares // self.num_ranks for segment in self.segments]
        return [(start + place * length, length) for start, place, length in zip(starts, places, lengths)]

    def counted(self, rank: int) -> list[tuple[int, int]]:
        """(start, length) among a rank's own rows of those that no lower rank holds."""
        found, start = [], 0
        for segment in self.segments:
            length = segment.size // segment.shares
            if rank % (self.num_ranks // segment.shares) == 0:
                found.append((start, length))
            start += length
        return found

    def shared_segments(self, rank: int) -> list[tuple[Segment, int, int, int]]:
        """(segment, start, length, place) of what a rank shares with others: where it starts among the rank's rows, how
        long it is there, and where that lies in the segment.
        """
        found, start = [], 0
        for segment in self.segments:
            length = segment.size // segment.shares
            if segment.shares < self.num_ranks:
                found.append((segment, start, length, rank * segment.shares // self.num_ranks * length))
            start += length
        return found

    def take(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """A rank's share of a whole tensor: a view if it is one range, else a copy."""
        pieces = [whole.narrow(dim, start, length) for start, length in self.ranges(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def arrange(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' shares of a whole tensor, joined in rank order."""
        return torch.cat([self.take(whole, dim, rank) for rank in range(self.num_ranks)], dim)

    def restore(self, arranged: torch.Tensor, dim: int) -> torch.Tensor:
        """What `arrange` came from; of rows that several ranks hold, the first one's."""
        held = arranged.split(self.local_size, dim)
        pieces, start = [], 0
        for segment in self.segments:
            length = segment.size // segment.shares
            first = range(0, self.num_ranks, self.num_ranks // segment.shares)
            pieces += [held[rank].narrow(dim, start, length) for rank in first]
            start += length
        return torch.cat(pieces, dim)


@dataclass(frozen=True)
class Cut:
    """A weight is cut along one dim."""

    dim: int
    rows: Rows


Sum = Callable[..., torch.Tensor]
"""Adds summands up over the ranks, or, given a number of shares too, over the neighbours that hold the same one; so
does its backward."""
SplitNorm = Callable[[Any, int, Sum], Callable[..., torch.Tensor]]
"""(norm, its features on all ranks, sum) -> a forward of the norm that is given this rank's features."""


@dataclass(frozen=True)
class BlockSplit:
    """How one block is cut; names are those of the transformers model, within the block."""

    weights: Mapping[str, Cut]
    """By parameter; all others are held whole by every rank."""
    attributes: Mapping[str, int] = field(default_factory=dict)
    """What the block's own code must take for its sizes, by path of the attribute. (A Conv1D's is set for it.)"""
    norms: Mapping[str, SplitNorm] = field(default_factory=dict)
    """Modules that normalise over features that are cut."""
    summed: tuple[str, ...] = ()
    """Linears within the block that multiply features that are cut, and whose whole output every rank needs."""
    buffers: Mapping[str, Cut] = field(default_factory=dict)
    """Those of which a rank needs its share only."""
    as_in_evaluation: bool = False
    """In training too, the block's own code must not take a kernel for training that runs past its modules."""


def rms_norm(norm: Any, num_features: int, add_up: Sum) -> Callable[[torch.Tensor], torch.Tensor]:
    """W x / sqrt(mean(x^2) + eps), in float32 but for the product with w, as transformers' llama has it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean_square = add_up(wide.square().sum(-1, keepdim=True)) / num_features
        return norm.weight * (wide * torch.rsqrt(mean_square + norm.variance_epsilon)).to(x.dtype)

    return forward


SplitBlock = Callable[[Any, int], BlockSplit]
"""(a block on any device, number of ranks) -> how it is cut; raises Indivisible."""


def even(num_ranks: int, size: int, what: str) -> Rows:
    """`size` rows, heads or features (`what`), in equal shares, one per rank."""
    require_divides(num_ranks, size, what)
    return Rows(num_ranks, (Segment(size, num_ranks),))


def blocked(num_ranks: int, sizes: Sequence[int], what: str) -> Rows:
    """Segments that lie one after the other, such as q, k and v, each in equal shares."""
    for size in sizes:
        require_divides(num_ranks, size, what)
    return Rows(num_ranks, tuple(Segment(size, num_ranks) for size in sizes))


def require_divides(num_ranks: int, size: int, what: str) -> None:
    """Indivisible if `size` things cannot be dealt out evenly."""
    if size % num_ranks:
        raise Indivisible(f"{size} {what}")


def linear(block: Any, name: str, features: str, rows: Rows) -> dict[str, Cut]:
    """The weights of a linear (or Conv1D) whose `out` or `in` features are cut, if the block has it.

    Its bias is cut with the features that come out; where features that go in are cut, every rank holds it whole.
    """
    try:
        module = unwrapped(block.get_submodule(name))
    except AttributeError:
        return {}
    transposed = isinstance(module, Conv1D)
    cuts = {f"{name}.weight": Cut(int((features == "in") != transposed), rows)}
    if features == "out" and getattr(module, "bias", None) is not None:
        cuts[f"{name}.bias"] = Cut(0, rows)
    return cuts


def depthwise(block: Any, name: str, channels: Rows) -> dict[str, Cut]:
    """The weights of a convolution that has one filter for each channel."""
    module = unwrapped(block.get_submodule(name))
    return {f"{name}.{own}": Cut(0, channels) for own, _ in module.named_parameters()}


def unwrapped(module: Any) -> Any:
    """The module of transformers that PEFT may have wrapped."""
    while (inner := getattr(module, "base_layer", None) or getattr(module, "original_module", None)) is not None:
        module = inner
    return module
