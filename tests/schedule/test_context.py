"""How rows are cut over ranks, and which way of attention sends least."""

from __future__ import annotations

import pytest

from shardwise.base.schedule.context import (
    AttentionShape,
    TokenSplit,
    best_way,
    reach_of,
    sent_by_attention,
)

SHAPE = AttentionShape(1024, 16, 4, 256, 256, 2)
"""A layer of Qwen3.5: 16 query heads and 4 of keys and values."""


def work(cut: TokenSplit, rank: int) -> int:
    """Return the pairs of chunks that a rank computes, in halves of a pair."""
    every = range(cut.num_ranks * cut.chunks_per_rank)
    return sum(2 * (key < own) + (key == own) for own in cut.chunks(rank) for key in every)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work(n):
    assert len({work(TokenSplit(n, zigzag=True), rank) for rank in range(n)}) == 1
    contiguous = [work(TokenSplit(n), rank) for rank in range(n)]
    assert max(contiguous) / (sum(contiguous) / n) == pytest.approx((2 * n - 1) / n)


@pytest.mark.parametrize("zigzag", [False, True])
def test_all_chunks_have_a_rank(zigzag):
    cut = TokenSplit(4, zigzag)
    chunks = sorted(chunk for rank in range(4) for chunk in cut.chunks(rank))
    assert chunks == list(range(4 * cut.chunks_per_rank))


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_a_window_reaches_so_many_chunks(window, reach):
    assert reach_of(window, 8) == reach


@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_ranks_together_send_what_the_closed_formulas_say(n):
    for zigzag, share in ((False, 0.5), (True, 0.75)):
        passes = [
            sent_by_attention(SHAPE, TokenSplit(n, zigzag), rank, "ring", None, 512)
            for rank in range(n)
        ]
        forward, backward = (sum(sent["send"][1] for sent in x) for x in zip(*passes))
        assert forward == share * n * (n - 1) * SHAPE.kv_bytes
        assert backward == 2 * forward


def test_a_window_takes_only_neighbours():
    def sent(rank: int, zigzag: bool) -> int:
        return sent_by_attention(SHAPE, TokenSplit(8, zigzag), rank, "gather", 100, 512)[0]["send"][
            1
        ]

    assert [sent(rank, False) for rank in range(8)] == [SHAPE.kv_bytes] * 7 + [0]
    # The front chunk to the rank after, the back one to the rank before; the last rank keeps one.
    assert [sent(rank, True) for rank in range(8)] == [
        SHAPE.kv_bytes // 2,
        *[SHAPE.kv_bytes] * 6,
        SHAPE.kv_bytes // 2,
    ]


def test_the_best_way_has_equal_work_first_then_sends_least():
    assert best_way(SHAPE, 4, contiguous=True) == "ulysses"
    assert best_way(SHAPE, 3, contiguous=True) == "ring"  # 16 heads
    assert best_way(SHAPE, 2, contiguous=False) == "ring"
    assert best_way(SHAPE, 16, contiguous=False) == "ulysses"
    many_kv_heads = AttentionShape(1024, 16, 16, 256, 256, 2)
    assert best_way(many_kv_heads, 4, contiguous=False) == "ulysses"
