"""In which order documents are read: functions of (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from shardwise.config import UserError


def permutation(size: int, seed: int, epoch: int, group: int = 0) -> np.ndarray:
    """The numbers 0 .. size-1 in an order that is a function of (seed, epoch, group) alone: [size] int64.

    They are sorted by raw 64-bit draws of PCG64, a stream that numpy keeps across versions; it makes no such promise
    for `Generator.permutation`, nor torch for `randperm`. While it is made it takes 16 bytes a number.
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed % 2**64, epoch, group))).random_raw(size)
    return np.argsort(keys, kind="stable")


def split(size: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Part the document numbers into (train, validation), sorted: `share` of them, drawn by `seed`, are held out.

    The count is rounded and kept between one document and all but one. UserError for a corpus of one document.
    """
    if size < 2:
        raise UserError(
            f"data.validation: a share of {share} cannot be held out, the whole corpus is one document; "
            "give validation files of their own, or 0"
        )
    held_out = min(max(round(share * size), 1), size - 1)
    order = permutation(size, seed, epoch=0)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


@dataclass(frozen=True, eq=False)
class Order:
    """Which document stands at which of the `len(order)` places of an epoch.

    Without weights an epoch holds each document once. With weights it holds as many, drawn from the groups in
    proportion: a group gives all its documents once, in an order of its own, before it gives one again, and goes on
    in the next epoch where it stopped.
    """

    groups: tuple[np.ndarray, ...]  # the document numbers of each group; one group where there are no weights
    weights: tuple[float, ...] | None
    seed: int

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def documents(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The documents at these places of an epoch, which is counted from 1: [places] int64."""
        size = len(self)
        drawn = permutation(size, self.seed, epoch)[places]
        if self.weights is None:
            return self.groups[0][drawn]
        before, after = (draws(total, self.weights) for total in (size * (epoch - 1), size * epoch))
        documents, begin = np.empty_like(drawn), 0
        for index in range(len(self.groups)):
            count = after[index] - before[index]
            (mine,) = np.nonzero((begin <= drawn) & (drawn < begin + count))
            documents[mine] = self._drawn_from(index, drawn[mine] - begin + before[index])
            begin += count
        return documents

    def _drawn_from(self, index: int, numbers: np.ndarray) -> np.ndarray:
        """The documents that a group's draws of these numbers, counted from 0 through all epochs, give."""
        group = self.groups[index]
        rounds, places = np.divmod(numbers, len(group))
        by_round = np.argsort(rounds, kind="stable")
        documents = np.empty_like(numbers)
        values, firsts = np.unique(rounds[by_round], return_index=True)
        for value, mine in zip(values, np.split(by_round, firsts[1:])):
            documents[mine] = group[permutation(len(group), self.seed, int(value), index + 1)[places[mine]]]
        return documents


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
