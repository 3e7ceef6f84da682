from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import UserError
from shardwise.data.order import Order, draws, permutation, split


def test_permutation_is_a_function_of_seed_and_epoch() -> None:
    orders = [permutation(50, seed, epoch).tolist() for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert permutation(50, 1, 2).tolist() == permutation(50, 1, 2).tolist()


def test_permutation_is_pinned() -> None:
    # Not derived: the value at the first release. A change of it changes the batches of everybody's runs.
    assert permutation(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_permutation_is_uniform() -> None:
    # 6 orders of 3 numbers over 6,000 epochs: 1,000 each, standard deviation sqrt(6000 * 1/6 * 5/6) = 29.
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6_000):
        order = tuple(permutation(3, 0, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 1_000) < 6 * 29 for count in counts.values())


@pytest.mark.parametrize(("size", "share", "held_out"), [(100, 0.02, 2), (10, 0.01, 1), (2, 0.9, 1), (3, 0.99, 2)])
def test_split_parts_the_documents(size: int, share: float, held_out: int) -> None:
    train, validation = split(size, share, seed=0)
    assert len(validation) == held_out
    assert sorted([*train, *validation]) == list(range(size))
    again = split(size, share, seed=0)
    assert (again[0].tolist(), again[1].tolist()) == (train.tolist(), validation.tolist())


def test_split_is_drawn_by_the_seed() -> None:
    assert len({tuple(split(100, 0.1, seed)[1].tolist()) for seed in range(5)}) == 5


def test_split_of_one_document() -> None:
    with pytest.raises(UserError, match=r"the whole corpus is one document; give validation files of their own, or 0$"):
        split(1, 0.5, seed=0)


weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@given(weights, st.integers(0, 2000))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_draws_are_proportional_at_any_time_and_never_fewer(weights: list[float], total: int) -> None:
    counts, after = draws(total, weights), draws(total + 1, weights)
    assert sum(counts) == total
    assert all(a in (b, b + 1) for a, b in zip(after, counts))  # one more in one group
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(count - share) <= len(weights) / 2 for count, share in zip(counts, exact))


def test_without_weights_an_epoch_holds_each_document_once() -> None:
    order = Order((np.array([3, 5, 9, 11]),), None, seed=2)
    for epoch in (1, 2):
        expected = np.array([3, 5, 9, 11])[permutation(4, 2, epoch)]
        assert order.documents(epoch, np.arange(4)).tolist() == expected.tolist()
        assert order.documents(epoch, np.array([2, 0])).tolist() == expected[[2, 0]].tolist()


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(1, 7),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_with_weights_each_group_is_read_through_before_it_is_read_again(
    groups: list[tuple[int, float]], seed: int, num_slots: int
) -> None:
    ends = np.cumsum([size for size, _ in groups])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    order = Order(tuple(numbers), tuple(weight for _, weight in groups), seed)
    size = len(order)
    epochs = [order.documents(epoch, np.arange(size)) for epoch in (1, 2, 3)]
    # What slots take of an epoch, place by place, is the epoch.
    for slot in range(min(num_slots, size)):
        places = np.arange(slot, size, num_slots)
        assert order.documents(2, places).tolist() == epochs[1][places].tolist()
    for index, group in enumerate(numbers):
        read = np.concatenate([epoch[np.isin(epoch, group)] for epoch in epochs])
        assert len(read) == draws(3 * size, [weight for _, weight in groups])[index]
        # Each of the group's documents was read as often as any other one, or once less.
        times = np.array([np.count_nonzero(read == document) for document in group])
        assert times.max() - times.min() <= 1


def test_weights_by_hand() -> None:
    # Documents 0-5 and 6-7, weights 1 : 3, so of the 8 draws of an epoch 2 and 6: the first group is read through once
    # in three epochs, the second one three times in each.
    order = Order((np.arange(6), np.arange(6, 8)), (1.0, 3.0), seed=0)
    epochs = [order.documents(epoch, np.arange(8)).tolist() for epoch in (1, 2, 3)]
    assert sorted(document for epoch in epochs for document in epoch if document < 6) == list(range(6))
    for epoch in epochs:
        assert [epoch.count(document) for document in (6, 7)] == [3, 3]
    assert len({tuple(epoch) for epoch in epochs}) == 3
