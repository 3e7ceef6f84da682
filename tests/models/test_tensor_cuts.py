"""How a dim of a weight is sharded: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.models.tensor_cuts import Indivisible, Rows, Segment, blocked, even


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """1 to 12 ranks, 1 to 4 segments of any number of shares that divides the ranks, of 1 to 4 rows
    each."""
    num_ranks = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    shares = st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    sizes = st.builds(
        lambda shares, rows: Segment(shares * rows, shares), shares, st.integers(1, 4)
    )
    return Rows(num_ranks, tuple(draw(st.lists(sizes, min_size=1, max_size=4))))


def held(rows: Rows, rank: int) -> list[int]:
    """The numbers of a rank's rows."""
    return rows.take(torch.arange(rows.size), 0, rank).tolist()


@settings(deadline=None)
@given(rows=some_rows(), dim=st.sampled_from((0, 1, 2, -1)))
def test_restoring_undoes_arranging(rows, dim):
    shape = [2, 3, 5]
    shape[dim] = rows.size
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    arranged = rows.arrange(whole, dim)
    assert arranged.shape[dim] == rows.num_ranks * rows.local_size
    assert torch.equal(rows.restore(arranged, dim), whole)
    for rank, share in enumerate(arranged.split(rows.local_size, dim)):
        assert torch.equal(share, rows.take(whole, dim, rank))


@settings(deadline=None)
@given(rows=some_rows())
def test_every_segment_is_sharded_by_itself_and_in_order(rows):
    """By the definition: share p of a segment goes to the ranks r with floor(r * shares / ranks) =
    p."""
    expected: list[list[int]] = [[] for _ in range(rows.num_ranks)]
    numbers = iter(range(rows.size))
    for segment in rows.segments:
        own = [next(numbers) for _ in range(segment.size)]
        length, neighbours = segment.size // segment.shares, rows.num_ranks // segment.shares
        for rank, share in enumerate(expected):
            first = rank // neighbours * length
            share += own[first : first + length]
    assert [held(rows, rank) for rank in range(rows.num_ranks)] == expected


@settings(deadline=None)
@given(rows=some_rows())
def test_the_shares_of_all_ranks_count_every_row_once(rows):
    counted: list[int] = []
    for rank in range(rows.num_ranks):
        for start, length in rows.counted(rank):
            counted += held(rows, rank)[start : start + length]
    assert sorted(counted) == list(range(rows.size))


@settings(deadline=None)
@given(rows=some_rows())
def test_shared_rows_are_those_that_several_ranks_hold(rows):
    holders = torch.zeros(rows.size, dtype=torch.long)
    for rank in range(rows.num_ranks):
        holders[held(rows, rank)] += 1
    starts = torch.tensor([0, *(segment.size for segment in rows.segments)]).cumsum(0).tolist()
    shared = [
        start for start, segment in zip(starts, rows.segments) if segment.shares < rows.num_ranks
    ]
    assert rows.shared == bool(shared) == bool((holders > 1).any())
    for rank in range(rows.num_ranks):
        found = rows.shared_segments(rank)
        assert len(found) == len(shared)
        own = held(rows, rank)
        for begin, (segment, start, length, place) in zip(shared, found):
            assert own[start : start + length] == list(range(begin + place, begin + place + length))
            assert (
                holders[begin : begin + segment.size].tolist()
                == [rows.num_ranks // segment.shares] * segment.size
            )
        several = [row for row in own if holders[row] > 1]
        assert [
            row for _, start, length, _ in found for row in own[start : start + length]
        ] == several


@settings(deadline=None)
@given(rows=some_rows())
def test_in_order_means_that_joined_shares_are_the_whole(rows):
    numbers = torch.arange(rows.size)
    unchanged = torch.equal(rows.arrange(numbers, 0), numbers)
    # One rank holds the whole, in however many segments.
    assert unchanged == (rows.in_order or rows.num_ranks == 1)


def test_shares_are_equal():
    with pytest.raises(AssertionError):
        Rows(4, (Segment(6, 4),))  # 6 rows in 4 shares
    with pytest.raises(AssertionError):
        Rows(4, (Segment(6, 3),))  # 3 shares for 4 ranks
    with pytest.raises(Indivisible, match=r"^6 heads$"):
        even(4, 6, "heads")
    with pytest.raises(Indivisible, match=r"^6 heads$"):
        blocked(4, (8, 6, 5), "heads")
    assert even(3, 6, "heads").segments == (Segment(6, 3),)
    assert blocked(2, (4, 6), "heads").segments == (Segment(4, 2), Segment(6, 2))
