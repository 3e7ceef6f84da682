"""The records of a stream of rows: a slot's own share, and what all slots leave."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.config import UserError
from shardwise.data.order import Order
from shardwise.data.packing import Document
from shardwise.data.state import Rest, SlotState
from shardwise.data.streaming import StreamOrder

CHUNK = 256  # records whose numbers are computed together: enough for numpy to be fast


class Item(NamedTuple):
    """A record that a stream reads, or what another stream has left of it."""

    number: int
    following: int  # the record that the order has behind it
    part: int = 0  # the first of its documents
    token: int = 0  # the first token of that one
    parts: frozenset[int] | None = None  # its documents; None: all of them
    was_read: bool = False
    was_begun: bool = False

    def left(self, documents: Sequence[Document]) -> list[Document]:
        """Return what is left of the documents of the record."""
        left = [
            document.after(self.token) if document.start.part == self.part else document
            for document in documents
            if document.start.part >= self.part
            and (self.parts is None or document.start.part in self.parts)
        ]
        if self.was_begun and left:  # a row before had its first token as its last one
            left[0].targets[0] = False
        return left


class SlotShare:
    """The records of slot j of G by place: those at the numbers j, j + G, ... of the order."""

    def __init__(self, order: Order | StreamOrder, slot: int, num_slots: int) -> None:
        self._order, self._numbers = order, range(slot, order.num_read, num_slots)
        self._begin, self._chunk = 0, list[tuple[int, int]]()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> Item:
        if place >= len(self):  # fewer epochs than before, and a document that was read ahead
            raise UserError(
                "training.epochs: the checkpoint has read more documents than that already; give "
                "more"
            )
        if not 0 <= place - self._begin < len(self._chunk):
            self._begin = place
            numbers = np.array(self._numbers[place : place + CHUNK], np.int64)
            found = self._order.documents(np.concatenate([numbers, numbers + 1]))
            self._chunk = list(zip(found[: len(numbers)], found[len(numbers) :]))
        return Item(*self._chunk[place - self._begin])


def left_by_all(order: Order | StreamOrder, rest: Rest) -> list[Item]:
    """Return the records of which the slots leave something, slot after slot."""
    shares = [SlotShare(order, slot, len(rest.begin)) for slot in range(len(rest.begin))]
    return [item for begin, share in zip(rest.begin, shares) for _, item in remaining(begin, share)]


def remaining(begin: SlotState, share: SlotShare | list[Item]) -> Iterator[tuple[int, Item]]:
    """Yield the records of a stream from where it begins, with their places.

    First come those that were read before and still wait for a row, then what a row has begun.
    """
    waiting: dict[int, set[int]] = {}
    for place, part, _ in begin.waiting:
        waiting.setdefault(place, set()).add(part)
    unbegun, first = begin.unbegun(), begin.place
    for place, parts in waiting.items():
        item = share[place]
        was_begun = item.was_begun or place not in unbegun
        yield place, item._replace(parts=frozenset(parts), was_read=True, was_begun=was_begun)
    if begin.is_within:
        part, token = begin.part, begin.token
        item = share[first]
        yield first, item._replace(part=part, token=token, was_read=True, was_begun=True)
        first += 1
    for place in range(first, len(share)):
        yield place, share[place]
