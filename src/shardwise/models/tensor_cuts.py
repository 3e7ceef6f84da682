"""How the weights of a block are cut over the ranks of tensor parallelism.

A block is a mixer or a feed-forward of a layer. It takes hidden states [B, T, D] that are equal on
every rank. With its share of the weights, each rank computes a partial sum of the block's output,
and only the output is reduced. So nothing between (a state, a gate, a router, a factor of an
adapter) needs a reduction of its own, as long as a rank can compute its share without the others'.
Weights that are whole on every rank get a partial sum of their gradient on each.

Source of the scheme: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


class Indivisible(ValueError):
    """Number of things that cannot be cut into equal shares, such as "4 key/value heads"."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows that are cut into equal shares, one after the other.

    With fewer shares than ranks, neighbours hold the same share (with 1, all ranks hold all rows).
    An example is a key/value head that query heads of several ranks attend to. Each of these ranks
    then has a partial sum of its gradient.
    """

    size: int
    shares: int

    @property
    def length(self) -> int:
        """The rows of one share."""
        return self.size // self.shares


@dataclass(frozen=True)
class Rows:
    """A dim of a weight as consecutive segments. A rank holds its share of each, in that order."""

    num_ranks: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for segment in self.segments:
            assert segment.size % segment.shares == 0, segment
            assert self.num_ranks % segment.shares == 0, segment

    @property
    def size(self) -> int:
        """The size of the whole dim."""
        return sum(segment.size for segment in self.segments)

    @property
    def local_size(self) -> int:
        """The size of a rank's part of the dim."""
        return sum(segment.length for segment in self.segments)

    @property
    def in_order(self) -> bool:
        """Whether the ranks' parts, joined in rank order, are the dim as it was."""
        return len(self.segments) == 1 and not self.shared

    @property
    def shared(self) -> bool:
        """Whether more than one rank holds some of the rows."""
        return self.num_shared > 0

    @property
    def num_shared(self) -> int:
        """The number of a rank's rows that other ranks hold too."""
        return sum(segment.length for segment in self.segments if segment.shares < self.num_ranks)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, length) in the whole dim of each range of a rank's rows."""
        starts = accumulate((segment.size for segment in self.segments), initial=0)
        return [
            (start + self._share(segment, rank) * segment.length, segment.length)
            for start, segment in zip(starts, self.segments)
        ]

    def counted(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, length) among a rank's rows of those that no lower rank holds."""
        return [
            (start, segment.length)
            for start, segment in self._local()
            if rank % (self.num_ranks // segment.shares) == 0
        ]

    def shared_segments(self, rank: int) -> list[tuple[Segment, int, int, int]]:
        """Return (segment, start, length, place) of each segment that a rank shares with others.

        `start` and `length`: where it lies among the rank's rows; `place`: where these lie in it.
        """
        return [
            (segment, start, segment.length, self._share(segment, rank) * segment.length)
            for start, segment in self._local()
            if segment.shares < self.num_ranks
        ]

    def _local(self) -> Iterable[tuple[int, Segment]]:
        """Return the segments with where their shares start among a rank's rows."""
        starts = accumulate((segment.length for segment in self.segments), initial=0)
        return zip(starts, self.segments)

    def _share(self, segment: Segment, rank: int) -> int:
        """Return which share of a segment a rank holds."""
        return rank * segment.shares // self.num_ranks

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor: a view if it is one range, else a copy."""
        pieces = [tensor.narrow(dim, start, length) for start, length in self.ranges(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def in_blocks(self, size: int) -> "Rows":
        """Return these rows as blocks of so many; raises Indivisible if a cut goes through one."""
        for segment in self.segments:
            if segment.length % size:
                raise Indivisible(f"{segment.length} columns in blocks of {size}")
        segments = (replace(segment, size=segment.size // size) for segment in self.segments)
        return Rows(self.num_ranks, tuple(segments))

    def arrange(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all ranks' parts of a whole tensor, joined in rank order."""
        return torch.cat([self.take(tensor, dim, rank) for rank in range(self.num_ranks)], dim)

    def restore(self, arranged: torch.Tensor, dim: int) -> torch.Tensor:
        """Undo `arrange`; of rows that several ranks hold, take those of the first."""
        parts = arranged.split(self.local_size, dim)
        pieces = [
            parts[rank].narrow(dim, start, segment.length)
            for start, segment in self._local()
            for rank in range(0, self.num_ranks, self.num_ranks // segment.shares)
        ]
        return torch.cat(pieces, dim)


@dataclass(frozen=True)
class DimCut:
    """A weight is cut along one dim."""

    dim: int
    rows: Rows


Sum = Callable[..., torch.Tensor]
"""Adds up partial sums over the ranks, or, given a number of shares too, over the neighbours that
hold the same share. Its backward does the same."""
SplitNorm = Callable[[Any, int, Sum], Callable[..., torch.Tensor]]
"""Makes of (norm, its features on all ranks, sum) a forward that takes this rank's features."""


@dataclass(frozen=True)
class BlockSplit:
    """How one block is cut; names are those of the transformers model, within the block."""

    weights: Mapping[str, DimCut]
    """The cut of each parameter; every rank has all of the others."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that the block's own code must find in these attributes, or a config with them. (Those
    of a Conv1D are set anyway.)"""
    norms: Mapping[str, SplitNorm] = field(default_factory=dict)
    """Modules that normalise over features that are cut."""
    norm_groups: int = 1
    """Groups of features that each of these norms is over, and so numbers that it adds up per
    token."""
    summed: tuple[str, ...] = ()
    """Linears within the block that multiply features that are cut, and whose whole output every
    rank needs."""
    buffers: Mapping[str, DimCut] = field(default_factory=dict)
    """Buffers of which a rank needs its part only."""


def rms_norm(norm: Any, num_features: int, add_up: Sum) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward of w x / sqrt(mean(x^2) + eps) over features that are cut.

    It computes in float32, except for the product with w, as transformers' llama does.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean_square = add_up(wide.square().sum(-1, keepdim=True)) / num_features
        return norm.weight * (wide * torch.rsqrt(mean_square + norm.variance_epsilon)).to(x.dtype)

    return forward


SplitBlock = Callable[[Any, int], BlockSplit]
"""Makes of (a block on any device, number of ranks) how it is cut; raises Indivisible."""


def even(num_ranks: int, size: int, what: str) -> Rows:
    """Return `size` rows, heads or features (`what`) in equal shares, one for each rank."""
    require_divides(num_ranks, size, what)
    return Rows(num_ranks, (Segment(size, num_ranks),))


def blocked(num_ranks: int, sizes: Sequence[int], what: str) -> Rows:
    """Return segments that lie one after the other, such as q, k and v, in equal shares."""
    for size in sizes:
        require_divides(num_ranks, size, what)
    return Rows(num_ranks, tuple(Segment(size, num_ranks) for size in sizes))


def require_divides(num_ranks: int, size: int, what: str) -> None:
    """Raise Indivisible if `size` things cannot be sharded evenly."""
    if size % num_ranks:
        raise Indivisible(f"{size} {what}")


def linear(block: Any, name: str, features: str, rows: Rows) -> dict[str, DimCut]:
    """Return the cuts of a linear (or Conv1D) by its `out` or `in` features, if the block has it.

    Its bias is cut with the features that come out. Where features that go in are cut, the bias is
    whole on every rank.
    """
    try:
        module = unwrapped(block.get_submodule(name))
    except AttributeError:
        return {}
    cuts = {f"{name}.weight": DimCut(_dim_of(module, features), rows)}
    if features == "out" and getattr(module, "bias", None) is not None:
        cuts[f"{name}.bias"] = DimCut(0, rows)
    return cuts


def evenly(
    block: Any, num_ranks: int, what: str, out: Sequence[str] = (), into: Sequence[str] = ()
) -> dict[str, DimCut]:
    """Return the cuts of linears that the block has in equal shares, as `linear` does.

    `out` are cut by the features that come out, `into` by those that go in; `what` names them.
    """
    weights: dict[str, DimCut] = {}
    for names, features in ((out, "out"), (into, "in")):
        for name in names:
            if (size := num_features(block, name, features)) is not None:
                weights |= linear(block, name, features, even(num_ranks, size, what))
    return weights


def num_features(block: Any, name: str, features: str) -> int | None:
    """Return the `out` or `in` features of a linear (or Conv1D); None if the block has no such."""
    try:
        module = unwrapped(block.get_submodule(name))
    except AttributeError:
        return None
    return module.weight.shape[_dim_of(module, features)]


def _dim_of(linear: Any, features: str) -> int:
    """Return a dim of the weight: a linear's is [out, in], a Conv1D's [in, out]."""
    return int((features == "in") != isinstance(linear, Conv1D))


def depthwise(block: Any, name: str, channels: Rows) -> dict[str, DimCut]:
    """Return the cuts of a convolution that has one filter for each channel."""
    module = unwrapped(block.get_submodule(name))
    return {f"{name}.{part}": DimCut(0, channels) for part, _ in module.named_parameters()}


def unwrapped(module: Any) -> Any:
    """Return the module of transformers that PEFT may have wrapped."""
    while (
        inner := getattr(module, "base_layer", None) or getattr(module, "original_module", None)
    ) is not None:
        module = inner
    return module
