"""How a rank gets the keys and values of other ranks, and how those ranks get the gradients.

Both ways implement `Exchange` of kernels/attention/places.py; context_attention.py describes them,
and schedule/context.py counts their bytes. Keys are [B, K, T, H] in the order of their places.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from shardwise.base.schedule.context import TokenSplit
from shardwise.kernels.attention.places import Keys, Message, Pair
from shardwise.parallel.reduce import all_gather, reduce_scatter


def ranges_of(chunks: tuple[int, ...], length: int) -> tuple[range, ...]:
    """Return the places of the tokens of chunks."""
    return tuple(range(chunk * length, (chunk + 1) * length) for chunk in chunks)


@dataclass(frozen=True)
class Ring:
    """Keys, and gradients of them, go from a rank straight to each rank that needs them.

    If ranks passed on what they get, every key would come to every rank. Straight sends leave out
    what lies after a query or before its window: half of all, a quarter if the cut is in zigzag.
    """

    group: dist.ProcessGroup
    cut: TokenSplit
    rank: int
    chunk_length: int
    reach: int | None

    def rounds(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Keys]:
        """See Exchange: as many rounds as ranks; in the first one nothing has come yet."""
        own = Keys(ranges_of(self.cut.chunks(self.rank), self.chunk_length), k, v)
        arriving = self._send_keys(1, k, v)
        yield own
        for distance in range(1, self.cut.num_ranks):
            some_k, some_v = arriving.wait()
            arriving = self._send_keys(distance + 1, k, v)
            chunks = self._read(self.rank, self._neighbour(-distance))
            yield Keys(ranges_of(chunks, self.chunk_length), some_k, some_v)

    def _send_keys(self, distance: int, k: torch.Tensor, v: torch.Tensor) -> Message:
        """Send the keys that the rank at `distance` reads, and get those that this rank reads."""
        if distance == self.cut.num_ranks:
            return Message((k, v), slice(0))
        reader, owner = self._neighbour(distance), self._neighbour(-distance)
        columns = self._columns(self._read(reader, self.rank))
        outgoing = _packed(k[:, :, columns], v[:, :, columns])
        return self._transfer(reader, outgoing, owner, self._read(self.rank, owner), k, v)

    def give_back(self, number: int, grad_k: torch.Tensor, grad_v: torch.Tensor) -> Message:
        """See Exchange."""
        if number == 0:
            return Message((grad_k, grad_v), slice(None))
        reader, owner = self._neighbour(number), self._neighbour(-number)
        chunks = self._read(reader, self.rank)
        return self._transfer(owner, _packed(grad_k, grad_v), reader, chunks, grad_k, grad_v)

    def _transfer(
        self,
        receiver: int,
        outgoing: torch.Tensor,
        sender: int,
        chunks: tuple[int, ...],
        like_k: torch.Tensor,
        like_v: torch.Tensor,
    ) -> Message:
        """Send to a rank of the group, and receive keys and values of `chunks` from another one.

        The bytes of `outgoing` leave this rank, in one message; an empty one is not sent.
        """
        num_tokens = len(chunks) * self.chunk_length
        incoming, pair = _unpacked(like_k, like_v, num_tokens)
        moves = []
        if outgoing.numel():
            send = dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=receiver)
            moves.append(send)
        if incoming.numel():
            receive = dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=sender)
            moves.append(receive)
        works = dist.batch_isend_irecv(moves) if moves else []
        return Message(pair, self._columns(chunks), tuple(works), outgoing)

    def _read(self, reader: int, owner: int) -> tuple[int, ...]:
        return self.cut.read(reader, owner, self.reach)

    def _neighbour(self, distance: int) -> int:
        return (self.rank + distance) % self.cut.num_ranks

    def _columns(self, chunks: tuple[int, ...]) -> slice:
        """Return where chunks lie among this rank's tokens; they lie one after the other."""
        own = self.cut.chunks(self.rank)
        first = own.index(chunks[0]) if chunks and chunks[0] in own else 0
        return slice(first * self.chunk_length, (first + len(chunks)) * self.chunk_length)


@dataclass(frozen=True)
class Gather:
    """Every rank gets all keys; their gradients are added up."""

    group: dist.ProcessGroup
    cut: TokenSplit

    def rounds(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Keys]:
        """See Exchange: one round with all keys, in the order of their places."""
        all_k, all_v = self._of_all(k, v)
        yield Keys((range(all_k.shape[2]),), all_k, all_v)

    def _of_all(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        n, chunks_per_rank = self.cut.num_ranks, self.cut.chunks_per_rank
        message = _packed(k, v)
        gathered = message.new_empty(n * message.numel())
        all_gather(gathered, message, group=self.group)  # (n-1) times its bytes reach each rank
        parts = gathered.view(n, -1).split([k.numel(), v.numel()], 1)
        both = [part.view(n, *x.shape) for part, x in zip(parts, (k, v))]
        chunks: dict[int, tuple[torch.Tensor, ...]] = {}
        for rank in range(n):
            rank_chunks = zip(*(x[rank].chunk(chunks_per_rank, 2) for x in both))
            chunks.update(zip(self.cut.chunks(rank), rank_chunks))
        all_k, all_v = (torch.cat(x, 2) for x in zip(*(chunks[i] for i in range(len(chunks)))))
        return all_k, all_v

    def give_back(self, number: int, grad_k: torch.Tensor, grad_v: torch.Tensor) -> Message:
        """See Exchange."""
        n = self.cut.num_ranks
        chunks = [x.chunk(n * self.cut.chunks_per_rank, 2) for x in (grad_k, grad_v)]
        message = grad_k.new_empty(n, (grad_k.numel() + grad_v.numel()) // n)
        for rank, part in enumerate(message):
            rank_chunks = (torch.cat([x[i] for i in self.cut.chunks(rank)], 2) for x in chunks)
            part.copy_(_packed(*rank_chunks))
        summed, pair = _unpacked(grad_k, grad_v, grad_k.shape[2] // n)
        reduce_scatter(
            summed, message.flatten(), group=self.group
        )  # (n-1)/n of its bytes leave each rank
        return Message(pair, slice(None))


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return keys and values as one message."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpacked(k: torch.Tensor, v: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, Pair]:
    """Return an empty message of so many tokens of k and v, and what will be in it."""
    shapes = [(*x.shape[:2], num_tokens, x.shape[-1]) for x in (k, v)]
    sizes = [prod(shape) for shape in shapes]
    message = k.new_empty(sum(sizes))
    grad_k, grad_v = (part.view(shape) for part, shape in zip(message.split(sizes), shapes))
    return message, (grad_k, grad_v)
