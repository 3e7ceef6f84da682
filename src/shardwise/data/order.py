"""The order in which documents are read: a function of (seed, epoch) alone.

Nothing is stored for it: the document at a place is computed when it is read, so memory does not
grow with the documents, and a resume begins at once (docs/decisions/008-index-permutation.md).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from shardwise.config import UserError

METHOD = "swap-or-not, 32 rounds, dealt to the rows in turn"
"""The name of the order. A change of the order needs another name."""

ROUNDS = 32


def permute(
    numbers: np.ndarray, size: int, seed: int, epoch: int | np.ndarray, group: int
) -> np.ndarray:
    """Return where a permutation of 0 .. size-1 takes these numbers, int64 of the same shape.

    The permutation is a function of (seed, epoch, group) alone. `epoch` may be an array that gives
    each number an epoch of its own.

    It is the swap-or-not shuffle (Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card
    Shuffle, CRYPTO 2012). Each round pairs x with pivot - x (modulo size), and draws for each pair
    whether to swap it. Two numbers keep their distance in a round that moves both or neither, which
    is every second one. So they keep it through all rounds with a probability of 2^-ROUNDS.
    """
    x, n = numbers.astype(np.uint64), np.uint64(size)
    key = _hash(_hash(_hash(np.zeros(1, np.uint64), seed % 2**64), epoch), group)
    for round_key in _hash(key, np.arange(ROUNDS)[:, None]):
        partner = (round_key % n + n - x) % n
        swap = _hash(round_key, np.maximum(x, partner)) >> np.uint64(63)
        x = np.where(swap == 1, partner, x)
    return x.astype(np.int64)


def _hash(key: np.ndarray, part: int | np.ndarray) -> np.ndarray:
    """Return a key of `key` and `part`: the output of splitmix64 in the state key ^ part.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    z = (key ^ np.asarray(part, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class DocumentGroup:
    """Some of the `size` documents from number `begin` on.

    The seed gives all of them an order. The group has the documents at `places` of that order.
    """

    begin: int
    size: int
    places: range

    def __len__(self) -> int:
        return len(self.places)


def split(
    sizes: Sequence[int], share: float
) -> tuple[tuple[DocumentGroup, ...], tuple[DocumentGroup, ...]]:
    """Split groups of documents of these sizes, one behind the other, into (train, validation).

    The share of each group is held out, rounded, but at least one document and never all of them.
    A share of 0 holds out nothing. UserError for a group of one document.
    """
    train, validation = [], []
    for index, size in enumerate(sizes):
        if share and size < 2:
            raise UserError(
                f"data.validation: a share of {share} cannot be held out of one document, and "
                "data.train, or an entry of it that has a weight, has no more; give validation "
                "files, or 0"
            )
        begin = sum(sizes[:index])
        held_out = min(max(round(share * size), 1), size - 1) if share else 0
        train.append(DocumentGroup(begin, size, range(held_out, size)))
        validation.append(DocumentGroup(begin, size, range(held_out)))
    return tuple(train), tuple(validation)


@dataclass(frozen=True)
class Order:
    """Which document stands at which number of all epochs, one behind the other, from 0.

    An epoch has as many documents as all groups together. They are drawn from the groups in
    proportion to the weights. A group gives each of its documents once, in an order of its own,
    before it gives one again. In the next epoch it continues where it stopped. So if the weights
    are the sizes of the groups, an epoch has each document once.
    """

    groups: tuple[DocumentGroup, ...]
    weights: tuple[float, ...] | None  # None: the sizes of the groups
    seed: int
    epochs: float | None = None
    """How many epochs are read; None: without end."""

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __str__(self) -> str:
        return f"the {len(self)} documents"

    @property
    def method(self) -> str:
        """The name of the order, which checkpoints keep."""
        return METHOD

    @property
    def num_documents(self) -> int:
        """The number of documents in an epoch."""
        return len(self)

    @property
    def sizes(self) -> list[int] | None:
        """The number of documents of each entry that has a weight; None without weights."""
        return None if self.weights is None else list(map(len, self.groups))

    @property
    def num_read(self) -> int:
        """The number of documents in all epochs, of a part of an epoch rounded."""
        return sys.maxsize if self.epochs is None else max(round(self.epochs * len(self)), 1)

    @property
    def most_left_out(self) -> int:
        """How many documents a slot may leave out one after the other."""
        return len(self) + 100

    def documents(self, numbers: np.ndarray) -> list[int]:
        """Return the documents at these numbers [numbers]."""
        size = len(self)
        epochs, places = np.divmod(numbers, size)
        # The draws of an epoch stand one group behind the other, and are then shuffled.
        unshuffled = permute(places, size, self.seed, epochs + 1, group=0)
        before, after = self._draws(epochs), self._draws(epochs + 1)
        documents, begin = np.empty_like(unshuffled), np.zeros_like(unshuffled)
        for index, (first, last) in enumerate(zip(before, after)):
            in_group = (begin <= unshuffled) & (unshuffled < begin + last - first)
            documents[in_group] = self._drawn(index, (unshuffled - begin + first)[in_group])
            begin += last - first
        return documents.tolist()

    def _draws(self, epochs: np.ndarray) -> np.ndarray:
        """Return how many draws each group gives in the first so many epochs [groups, epochs]."""
        if self.weights is None:
            return np.outer(list(map(len, self.groups)), epochs)
        different, which = np.unique(epochs, return_inverse=True)
        counts = [draws(len(self) * int(number), self.weights) for number in different]
        return np.array(counts, np.int64).reshape(-1, len(self.groups)).T[:, which]

    def _drawn(self, index: int, numbers: np.ndarray) -> np.ndarray:
        """Return the documents that a group gives in its draws `numbers`, int64 [numbers].

        Draws are counted from 0, over all epochs. Each len(group) draws are a round, which gives
        each document once.
        """
        group = self.groups[index]
        rounds, places = np.divmod(numbers, len(group))
        # Round r has the permutation of epoch r + 1; that of epoch 0 decides what is held out.
        places = permute(places, len(group), self.seed, rounds + 1, index + 1)
        places += group.places.start
        return group.begin + permute(places, group.size, self.seed, 0, index + 1)


def draws(total: int, weights: Sequence[float]) -> list[int]:
    """Return how many of the first `total` draws each group gives, in proportion to its weight.

    The numbers add up to `total`. Each group takes its rounded share of what the groups before it
    leave. So a number never falls as `total` grows, and differs from the exact share by at most
    half a draw per group.
    """
    counts, rest = [], sum(map(Fraction, weights))
    for weight in map(Fraction, weights):
        counts.append(floor(total * weight / rest + Fraction(1, 2)))
        total -= counts[-1]
        rest -= weight
    return counts
