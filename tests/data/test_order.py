import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import UserError
from shardwise.data.order import ROUNDS, DocumentGroup, Order, _hash, draws, permute, split

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def place(x: int, size: int, seed: int, epoch: int, group: int) -> int:
    """Compute `permute` as its docstring describes it, in Python's integers, for one number."""
    key = splitmix64(splitmix64(splitmix64(seed & MASK) ^ epoch) ^ group)
    for number in range(ROUNDS):
        round_key = splitmix64(key ^ number)
        pair = (round_key % size - x) % size
        if splitmix64(round_key ^ max(x, pair)) >> 63:
            x = pair
    return x


sizes = st.one_of(st.integers(1, 70), st.integers(1, 5000))
keys = {
    "seed": st.integers(-(2**70), 2**70),
    "epoch": st.integers(0, 2**40),
    "group": st.integers(0, 9),
}


@given(size=sizes, **keys)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_permute_is_a_permutation_of_any_size(size, seed, epoch, group):
    assert sorted(permute(np.arange(size), size, seed, epoch, group).tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), numbers=st.lists(st.integers(0, 2**62), max_size=5), **keys)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_permute_is_integer_arithmetic(size, numbers, seed, epoch, group):
    numbers = [number % size for number in numbers]
    expected = [place(number, size, seed, epoch, group) for number in numbers]
    assert permute(np.array(numbers, np.int64), size, seed, epoch, group).tolist() == expected
    epochs = np.full(len(numbers), epoch)
    assert permute(np.array(numbers, np.int64), size, seed, epochs, group).tolist() == expected


def test_hash_is_splitmix64() -> None:
    # The first output of the published generator from seed 0.
    assert _hash(np.zeros(1, np.uint64), 0).tolist() == [0xE220A8397B1DCDAF]


def test_permutation_is_pinned() -> None:
    # Not derived: the value at the first release. A change of it changes the batches of everybody's
    # runs.
    assert permute(np.arange(8), 8, 0, 1, 0).tolist() == [0, 5, 2, 6, 3, 1, 4, 7]


def test_permutation_is_a_function_of_seed_epoch_and_group():
    drawn = {
        tuple(permute(np.arange(50), 50, seed, epoch, group).tolist())
        for seed in (0, 1, -1)
        for epoch in (0, 1, 2)
        for group in (0, 1, 2)
    }
    assert len(drawn) == 27


@pytest.mark.parametrize("size", [3, 4])
def test_permutation_of_few_is_uniform(size: int) -> None:
    # Each of size! orders in 500 of 500 * size! epochs; standard deviation below sqrt(500) = 22.4.
    num_orders = {3: 6, 4: 24}[size]
    numbers, epochs = (
        np.tile(np.arange(size), 500 * num_orders),
        np.repeat(np.arange(500 * num_orders), size),
    )
    counts = Counter(map(tuple, permute(numbers, size, 0, epochs, 0).reshape(-1, size).tolist()))
    assert len(counts) == num_orders
    assert all(abs(count - 500) < 5 * 22.4 for count in counts.values())


def test_where_blocks_land_is_uniform() -> None:
    # From each of 64 blocks of 64 neighbours into each of 64 blocks of places: one document a seed,
    # 64 over 64 seeds. A permutation fixes all sums of rows and columns, so chi-square has 63 * 63
    # = 3969 degrees of freedom and a standard deviation of sqrt(2 * 3969) = 89.
    size, counts = 64 * 64, np.zeros((64, 64))
    for seed in range(64):
        np.add.at(
            counts, (np.arange(size) // 64, permute(np.arange(size), size, seed, 1, 0) // 64), 1
        )
    chi_square = ((counts - 64) ** 2 / 64).sum()
    assert abs(chi_square - 3969) < 5 * 89


def test_neighbours_do_not_stay_together() -> None:
    # Over 20 seeds of 5,000 numbers: the correlation of before and after is a mean of 0 with
    # deviation 1/sqrt(5000), as is that of the places of neighbours; and of 4,999 pairs of
    # neighbours 2 stay neighbours on average (2 * 4999 / 5000), 40 over all seeds, with deviation
    # sqrt(40) = 6.3.
    size, adjacent = 5000, 0
    for seed in range(20):
        after = permute(np.arange(size), size, seed, 1, 0)
        assert abs(np.corrcoef(np.arange(size), after)[0, 1]) < 5 / size**0.5
        assert abs(np.corrcoef(after[:-1], after[1:])[0, 1]) < 5 / size**0.5
        adjacent += np.count_nonzero(abs(np.diff(after)) == 1)
    assert abs(adjacent - 40) < 5 * 6.3


def test_seeds_and_epochs_are_independent() -> None:
    # Two random permutations agree in one place on average, with deviation 1: 41 over 41 pairs,
    # with sqrt(41) = 6.4.
    orders = [
        permute(np.arange(1000), 1000, seed, epoch, 0) for seed in (0, 1) for epoch in range(1, 22)
    ]
    agree = sum(np.count_nonzero(one == two) for one, two in itertools.pairwise(orders))
    assert abs(agree - 41) < 5 * 6.4


def epoch_of(order: Order, epoch: int) -> list[int]:
    return order.documents(np.arange(len(order)) + len(order) * (epoch - 1))


@pytest.mark.parametrize(
    ("size", "share", "held_out"), [(100, 0.02, 2), (10, 0.01, 1), (2, 0.9, 1), (3, 0.99, 2)]
)
def test_split_parts_the_documents(size, share, held_out):
    train, validation = (Order(groups, None, seed=0) for groups in split([size], share))
    assert (len(train), len(validation)) == (size - held_out, held_out)
    for epoch in (1, 2):  # another order, of the same documents
        read = [*epoch_of(train, epoch), *epoch_of(validation, 3)]
        assert sorted(read) == list(range(size))


def test_split_of_nothing():
    train, validation = split([3, 1], 0.0)
    assert train == (DocumentGroup(0, 3, range(3)), DocumentGroup(3, 1, range(1)))
    assert [len(group) for group in validation] == [0, 0]


def test_split_is_drawn_by_the_seed():
    _, held_out = split([100], 0.1)
    assert len({frozenset(epoch_of(Order(held_out, None, seed), 1)) for seed in range(5)}) == 5


def test_split_of_each_group():
    orders = [Order(groups, None, seed=4) for groups in split([10, 40], 0.1)]
    train, validation = (np.array(epoch_of(order, 1)) for order in orders)
    assert [np.count_nonzero(validation < 10), np.count_nonzero(validation >= 10)] == [1, 4]
    assert sorted([*train, *validation]) == list(range(50))


@pytest.mark.parametrize("sizes", [[1], [5, 1]])
def test_split_of_one_document(sizes):
    with pytest.raises(UserError, match=r"^data\.validation: .* 0\.5 .* one document"):
        split(sizes, 0.5)


weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@given(weights, st.integers(0, 2000))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_draws_are_proportional_at_any_time_and_never_fewer(weights, total):
    counts, after = draws(total, weights), draws(total + 1, weights)
    assert sum(counts) == total
    assert all(a in (b, b + 1) for a, b in zip(after, counts))  # one more in one group
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(count - share) <= len(weights) / 2 for count, share in zip(counts, exact))


def test_without_weights_an_epoch_holds_each_document_once():
    order = Order((DocumentGroup(0, 4, range(4)), DocumentGroup(4, 300, range(300))), None, seed=2)
    epochs = [epoch_of(order, epoch) for epoch in (1, 2, 3)]
    assert all(sorted(epoch) == list(range(304)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(1, 7),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_with_weights_each_group_is_read_through_before_it_is_read_again(groups, seed, num_slots):
    ends = np.cumsum([size for size, _ in groups])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    order = Order(
        split([size for size, _ in groups], 0.0)[0], tuple(weight for _, weight in groups), seed
    )
    size = len(order)
    epochs = [np.array(epoch_of(order, epoch)) for epoch in (1, 2, 3)]
    # What slots take of all epochs, number by number, are the epochs.
    for slot in range(num_slots):
        taken = np.arange(slot, 3 * size, num_slots)
        assert order.documents(taken) == np.concatenate(epochs)[taken].tolist()
    for index, group in enumerate(numbers):
        read = np.concatenate([epoch[np.isin(epoch, group)] for epoch in epochs])
        assert len(read) == draws(3 * size, [weight for _, weight in groups])[index]
        # Each of the group's documents was read as often as any other one, or once less.
        times = np.array([np.count_nonzero(read == document) for document in group])
        assert times.max() - times.min() <= 1


def test_weights_by_hand() -> None:
    # Documents 0-5 and 6-7, weights 1 : 3, so of the 8 draws of an epoch 2 and 6: the first group
    # is read through once in three epochs, the second one three times in each.
    order = Order(
        (DocumentGroup(0, 6, range(6)), DocumentGroup(6, 2, range(2))), (1.0, 3.0), seed=0
    )
    epochs = [epoch_of(order, epoch) for epoch in (1, 2, 3)]
    assert sorted(document for epoch in epochs for document in epoch if document < 6) == list(
        range(6)
    )
    for epoch in epochs:
        assert [epoch.count(document) for document in (6, 7)] == [3, 3]
    assert len({tuple(epoch) for epoch in epochs}) == 3
