"""The chunks of tokens in which a core is computed: what is alive meanwhile, and FLOPs."""

from collections.abc import Callable
from typing import NamedTuple

OWN_FORWARD, OWN_BACKWARD = 0.7, 0.95
"""The chunk's own share of what is alive in a forward and in a backward; see Chunks.in_forward. The
four recurrences by themselves have 0.66 to 0.74 and 0.79 to 0.90 on a CPU; in a backward more is
alive around them."""


class Chunks(NamedTuple):
    """The tokens of a row in chunks, of which the last one may be shorter."""

    size: int
    num_full: int
    rest: int

    @property
    def number(self) -> int:
        """The chunks of a row."""
        return self.num_full + (self.rest > 0)

    @property
    def longest(self) -> int:
        """The tokens of the first chunk."""
        return self.size if self.num_full else self.rest

    def sum(self, per_chunk: Callable[[int], int]) -> int:
        """Return the sum of what each chunk has by its number of tokens."""
        return self.num_full * per_chunk(self.size) + (per_chunk(self.rest) if self.rest else 0)

    def in_forward(self, per_chunk: Callable[[int], int]) -> int:
        """Return the most bytes that are alive in a forward, from the first chunk to the last.

        `per_chunk` gives those of a chunk between chunks of its length. Some of them are of the one
        before, to which names still refer.
        """
        own, first = OWN_FORWARD, per_chunk(self.longest)
        if self.num_full > 1:
            return first
        last = own * per_chunk(self.rest) + (1 - own) * first if self.num_full else 0
        return round(max(own * first, last))

    def in_backward(self, per_chunk: Callable[[int], int]) -> int:
        """Return the same of a backward, which goes from the last chunk to the first."""
        own, first = OWN_BACKWARD, per_chunk(self.longest)
        if self.num_full > 1:
            return first
        before = per_chunk(self.rest) if self.num_full else 0
        return round(own * first + (1 - own) * before)


def chunks_of(num_tokens: int, size: int, pads: bool = False) -> Chunks:
    """Return the chunks of at most `size` tokens of a row; `pads`: the last one is filled up."""
    num_full, rest = divmod(num_tokens, size)
    return Chunks(size, num_full + (rest > 0), 0) if pads else Chunks(size, num_full, rest)


class ChunkFlops(NamedTuple):
    """FLOPs of a chunk: a multiple of its tokens, of their pairs, and of their triples."""

    tokens: int = 0
    pairs: int = 0
    triples: int = 0

    def __call__(self, num_tokens: int) -> int:
        """Return the FLOPs of a chunk of so many tokens."""
        return num_tokens * (self.tokens + num_tokens * (self.pairs + num_tokens * self.triples))


class CoreFlops(NamedTuple):
    """FLOPs that a core runs on a row, chunk by chunk, as its node on a tape says."""

    forward: ChunkFlops
    backward: ChunkFlops
    """FLOPs of a backward, without a recomputed forward."""
    map_forward: ChunkFlops = ChunkFlops()
    """FLOPs of the map of a rank's tokens under `cp`; 0: the core has no state."""
    map_backward: ChunkFlops = ChunkFlops()
    """FLOPs of the gradient of the state before a rank's tokens under `cp`."""
    times: int = 1
    """Heads, each of which runs as much."""
    chunk_size: int = 0
    """Tokens of a chunk; 0: the row is one."""
    pads: bool = False
    """Whether the last chunk is filled up with tokens that do nothing."""
    is_kept: bool = False
    """Whether `training.checkpointing: operators` keeps its output, that of one operator."""

    def per_token(self, length: int, with_maps: bool = False) -> tuple[float, float]:
        """Return the FLOPs per token of a forward and of a backward, in a row of so many tokens.

        `with_maps`: those of `cp` too, which pass on a state.
        """
        chunks = chunks_of(length, self.chunk_size or length, self.pads)
        passes = self.forward, self.backward, self.map_forward, self.map_backward
        forward, backward, *maps = (self.times * chunks.sum(flops) / length for flops in passes)
        return forward + with_maps * maps[0], backward + with_maps * maps[1]
