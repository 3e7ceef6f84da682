"""In which order documents are read: functions of (seed, epoch) alone, computed where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from shardwise.config import UserError

METHOD = "swap-or-not, 32 rounds"
"""What a saved place in an epoch means; another name for each change of the order."""

ROUNDS = 32
CHUNK = 256  # documents that are drawn at a time: many enough for numpy, few enough for any memory


def permuted(numbers: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, group: int) -> np.ndarray:
    """Where a permutation of 0 .. size-1, a function of (seed, epoch, group) alone, takes these numbers: int64.

    The swap-or-not shuffle (Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012): each
    round pairs x with pivot - x (modulo size), and swaps a pair or does not, by a bit that is drawn for the pair. Each
    number is moved in half of the rounds, to any place; so two numbers are moved by all rounds together, and keep their
    distance, with a chance of 2^-ROUNDS. `epoch` may be an array of the same shape: an epoch for each number.
    """
    x, n = numbers.astype(np.uint64), np.uint64(size)
    key = _hash(_hash(_hash(np.zeros(1, np.uint64), seed % 2**64), epoch), group)
    for number in range(ROUNDS):
        round_key = _hash(key, number)
        pair = (round_key % n + n - x) % n
        swap = _hash(round_key, np.maximum(x, pair)) >> np.uint64(63)
        x = np.where(swap == 1, pair, x)
    return x.astype(np.int64)


def _hash(key: np.ndarray, part: int | np.ndarray) -> np.ndarray:
    """The key and one more part in one: what splitmix64 (Steele, Lea, Flood, OOPSLA 2014) gives at key ^ part."""
    z = (key ^ np.asarray(part, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Group:
    """Some of the `size` documents from number `begin` on: those at these places of an order drawn by the seed."""

    begin: int
    size: int
    places: range

    def __len__(self) -> int:
        return len(self.places)


def split(sizes: Sequence[int], share: float) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Part groups of documents of these sizes, which lie one after the other, into (train, validation).

    Of each group this share is held out, rounded and kept between one document and all but one; none if it is 0.
    UserError for a group of one document.
    """
    train, validation = [], []
    for index, size in enumerate(sizes):
        if share and size < 2:
            raise UserError(
                f"data.validation: a share of {share} cannot be held out of one document, which is all that data.train "
                "(with data.weights, an entry of it) has; give validation files of their own, or 0"
            )
        begin, held_out = sum(sizes[:index]), min(max(round(share * size), 1), size - 1) if share else 0
        train.append(Group(begin, size, range(held_out, size)))
        validation.append(Group(begin, size, range(held_out)))
    return tuple(train), tuple(validation)


@dataclass(frozen=True)
class Order:
    """Which document stands at which of the `len(order)` places of an epoch.

    An epoch holds as many documents as the groups have, drawn from them in proportion to the weights: a group gives all
    its documents once, in an order of its own, before it gives one again, and goes on in the next epoch where it
    stopped. So with a group's size for its weight an epoch holds each document once.
    """

    groups: tuple[Group, ...]
    weights: tuple[float, ...] | None  # none: the sizes
    seed: int

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def read(self, epoch: int, places: range) -> Iterator[int]:
        """The documents at these places of an epoch, which is counted from 1; a few at a time are drawn."""
        for begin in range(0, len(places), CHUNK):
            yield from self._documents(epoch, np.array(places[begin : begin + CHUNK])).tolist()

    def _documents(self, epoch: int, places: np.ndarray) -> np.ndarray:
        size, weights = len(self), self.weights or [len(group) for group in self.groups]
        before, after = (draws(total, weights) for total in (size * (epoch - 1), size * epoch))
        drawn = permuted(places, size, self.seed, epoch, group=0)
        documents, begin = np.empty_like(drawn), 0
        for index, (first, last) in enumerate(zip(before, after)):
            mine = (begin <= drawn) & (drawn < begin + last - first)
            documents[mine] = self._drawn_from(index, drawn[mine] - begin + first)
            begin += last - first
        return documents

    def _drawn_from(self, index: int, numbers: np.ndarray) -> np.ndarray:
        """The documents that a group's draws of these numbers, counted from 0 through all epochs, give."""
        group = self.groups[index]
        rounds, places = np.divmod(numbers, len(group))
        places = group.places.start + permuted(places, len(group), self.seed, rounds + 1, index + 1)
        return group.begin + permuted(places, group.size, self.seed, 0, index + 1)  # no round is 0


def draws(total: int, weights: Sequence[float]) -> list[int]:
    """How many of the first `total` draws come from each group: proportional to the weights, and `total` in all.

    Each group takes its rounded share of what the groups before it have left. So a count never falls as `total` grows,
    and differs from the exact share by half a draw per group at most, for any `total`.
    """
    counts, rest = [], sum(map(Fraction, weights))
    for weight in map(Fraction, weights):
        counts.append(floor(total * weight / rest + Fraction(1, 2)))
        total -= counts[-1]
        rest -= weight
    return counts
