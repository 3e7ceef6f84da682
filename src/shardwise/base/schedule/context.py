"""How the tokens of a row are cut over the ranks of `cp`, and what its layers send then.

A row is cut into chunks of equal length, in order of their place. A rank has one of them, or, with
`zigzag`, one from the front and one from the back: of 4 ranks the first has chunks 0 and 7, the
last 3 and 4. A query meets the keys before it, so the last chunk does most of the work; in pairs
all ranks do the same.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Literal

from shardwise.config import Parallel

Way = Literal["ring", "gather", "ulysses"]


@dataclass(frozen=True)
class TokenSplit:
    """A row in chunks, which `num_ranks` ranks share."""

    num_ranks: int
    zigzag: bool = False

    @property
    def chunks_per_rank(self) -> int:
        """Return how many chunks each rank has."""
        return 2 if self.zigzag else 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank, in the order of their place."""
        return (rank, 2 * self.num_ranks - 1 - rank) if self.zigzag else (rank,)

    def read(self, reader: int, owner: int, reach: int | None) -> tuple[int, ...]:
        """Return the chunks of `owner` that queries of `reader` see.

        `reach`: how many chunks before its own a query sees (see `reach_of`); None: all.
        """
        far = 2 * self.num_ranks if reach is None else reach
        return tuple(
            chunk
            for chunk in self.chunks(owner)
            if any(0 <= own - chunk <= far for own in self.chunks(reader))
        )


def reach_of(window: int | None, chunk_length: int) -> int | None:
    """Return how many chunks before its own hold keys of a query's window; None without one."""
    return None if window is None else -(-(window - 1) // chunk_length)


@dataclass(frozen=True)
class AttentionShape:
    """Attention of the tokens of one rank in one layer."""

    num_tokens: int
    """Tokens of this rank, in all rows: B T / n."""
    num_heads: int
    """N, of queries; with tensor parallelism those of this rank, as below."""
    num_kv_heads: int
    """K."""
    key_size: int
    value_size: int
    itemsize: int
    """Bytes of an element."""

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of this rank's keys and values."""
        sizes = self.key_size + self.value_size
        return self.num_tokens * self.num_kv_heads * sizes * self.itemsize

    def bytes_by_heads(self, num_ranks: int) -> tuple[int, int]:
        """Return the bytes of queries, keys and values, and of outputs, in an exchange of heads."""
        per_head = self.num_tokens * self.itemsize
        num_kv_heads = lcm(self.num_kv_heads, num_ranks)
        queries = per_head * self.num_heads * self.key_size
        keys = per_head * num_kv_heads * (self.key_size + self.value_size)
        return queries + keys, per_head * self.num_heads * self.value_size


MessageKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
Sent = dict[MessageKind, tuple[int, int]]
"""Kind of message -> calls, and bytes of what they are given, as in planner/communication.py."""


def way_taken(way: Way, cut: TokenSplit, reach: int | None) -> Way:
    """Return how keys travel: a window that reaches not all chunks is no reason to gather all."""
    spans_row = reach is None or reach >= cut.num_ranks * cut.chunks_per_rank - 1
    return "ring" if way == "gather" and not spans_row else way


def sent_by_attention(
    shape: AttentionShape,
    cut: TokenSplit,
    rank: int,
    way: Way,
    window: int | None,
    tokens_per_row: int,
) -> tuple[Sent, Sent]:
    """Return what a rank sends in a forward and in a backward of one layer and micro-batch.

    `tokens_per_row`: tokens of a row that the rank has.

    Gather: the bytes X n of the keys and values of all n ranks; the backward gathers them again,
    and adds up their gradients. Ulysses: queries, keys and values in one call, outputs in another;
    their gradients in two as well. Ring: see `_sent_by_ring`.
    """
    reach = reach_of(window, tokens_per_row // cut.chunks_per_rank)
    taken = way_taken(way, cut, reach)
    if taken == "ring":
        return _sent_by_ring(shape.kv_bytes // cut.chunks_per_rank, cut, rank, reach)
    if taken == "gather":
        all_keys = 1, cut.num_ranks * shape.kv_bytes
        gathered: Sent = {"all-gather": all_keys}
        return gathered, {**gathered, "reduce-scatter": all_keys}
    exchanged: Sent = {"all-to-all": (2, sum(shape.bytes_by_heads(cut.num_ranks)))}
    return exchanged, exchanged


@lru_cache(maxsize=256)  # many layers and layouts send the same
def _sent_by_ring(
    chunk_bytes: int, cut: TokenSplit, rank: int, reach: int | None
) -> tuple[Sent, Sent]:
    """Return what a rank sends point to point: to each other rank the chunks that it reads.

    The backward sends them again, and gives back gradients of what this rank read itself. Without a
    window rank r of n, cut contiguously, sends its keys to the n - 1 - r ranks after it, and
    gradients to the r before: n (n - 1) / 2 times the keys of a rank in a forward of all ranks. In
    zigzag it sends both chunks to r ranks and the front one to n - 1 - r: 3 n (n - 1) / 4 times.
    """
    others = [other for other in range(cut.num_ranks) if other != rank]
    sent = [len(cut.read(other, rank, reach)) for other in others]
    read = [len(cut.read(rank, other, reach)) for other in others]
    calls, num_chunks = sum(map(bool, sent)), sum(sent)
    both = calls + sum(map(bool, read)), (num_chunks + sum(read)) * chunk_bytes
    return {"send": (calls, num_chunks * chunk_bytes)}, {"send": both}


def sent_by_convolution(
    width: int, token_bytes: int, rank: int, num_ranks: int
) -> tuple[Sent, Sent]:
    """Return what a rank sends in a forward and in a backward of one convolution and micro-batch.

    The forward sends the inputs of a rank's last `width` - 1 tokens to the rank after it, the
    backward their gradient to the rank before. `token_bytes`: of one token of every row.
    """
    num_bytes = (width - 1) * token_bytes
    forward, backward = int(rank < num_ranks - 1), int(rank > 0)
    return {"send": (forward, forward * num_bytes)}, {"send": (backward, backward * num_bytes)}


def sent_by_recurrence(
    transition_numel: int, state_numel: int, itemsize: int, rank: int, num_ranks: int
) -> tuple[Sent, Sent]:
    """Return what a rank sends in a forward and in a backward of one recurrent core.

    A prefix scan passes affine maps on: a transition, and a state in the forward or the gradient of
    one in the backward. In the round of distance d, of log2 n rounds, rank r sends one to rank
    r + d, without its transition where r < d; the backward is the same from the last rank. Their
    elements are those of all rows of a micro-batch, and are as wide as states. A transition is a
    matrix [B, N, S, S] per head, or factors of a state.
    """

    def sent(place: int) -> Sent:
        calls = num_elements = 0
        distance = 1
        while place + distance < num_ranks:
            calls += 1
            num_elements += state_numel + (transition_numel if place >= distance else 0)
            distance *= 2
        return {"send": (calls, num_elements * itemsize)}

    return sent(rank), sent(num_ranks - 1 - rank)


def best_way(shape: AttentionShape, num_ranks: int, contiguous: bool) -> Way:
    """Return the way of `parallel.cp_attention: auto`.

    `contiguous`: a recurrent layer needs tokens that lie one after the other, so no zigzag.

    With n ranks, X the bytes of a rank's keys and values and Y those of its queries and outputs,
    these bytes leave a rank on average in a forward and a backward of full attention:

        gather                3 (n - 1) X                    one call each
        ring, contiguous      3 (n - 1) X / 2                while it computes
        ring, zigzag          9 (n - 1) X / 4                while it computes
        ulysses               2 (n - 1) / n (X' + Y)         X' is X with lcm(K, n) heads for K

    and the rank with the most work does (2 n - 1) / n of the mean if the cut is contiguous, except
    with ulysses: up to twice the time of attention, which grows by T^2 while what is sent grows by
    T. So ways of equal work come first, of these the one that sends less, and of the others the
    ring. Ulysses needs n to divide the query heads. Gather always sends more than the ring; it is
    for devices where one call costs less than several messages.
    """
    has_ulysses = shape.num_heads % num_ranks == 0
    if contiguous:
        return "ulysses" if has_ulysses else "ring"
    by_heads = 2 * sum(shape.bytes_by_heads(num_ranks)) / num_ranks
    return "ulysses" if has_ulysses and by_heads < 9 * shape.kv_bytes / 4 else "ring"


@dataclass(frozen=True)
class ContextFacts:
    """Facts that decide how the tokens of a model's rows are cut over ranks."""

    contiguous: bool
    """Whether some layer needs tokens that lie one after the other: a recurrence or convolution."""
    attention: AttentionShape | None
    """The attention of a whole layer, for one token of one byte; None: the model has none."""

    def way_and_cut(self, parallel: Parallel) -> tuple[Way, TokenSplit]:
        """Return the way of `parallel.cp_attention`, and the cut that goes with it."""
        num_ranks, way = parallel.cp, parallel.cp_attention
        if way == "auto":
            shape = self.on_rank(parallel)
            way = "ring" if shape is None else best_way(shape, num_ranks, self.contiguous)
        return way, TokenSplit(num_ranks, zigzag=not self.contiguous and way != "ulysses")

    def on_rank(self, parallel: Parallel) -> AttentionShape | None:
        """Return the attention of a rank of `tp`."""
        if self.attention is None:
            return None
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        kv_heads = max(1, kv_heads // parallel.tp)
        return replace(self.attention, num_heads=heads // parallel.tp, num_kv_heads=kv_heads)
