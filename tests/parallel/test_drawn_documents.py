"""Drawn documents, cuts and ranks: every recurrent core equals itself on complete rows.

The ranks are threads, so that a case takes milliseconds; test_neighbours.py has processes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.kernels import (
    gated_delta_rule,
    kimi_delta_attention,
    selective_scan,
    state_space_duality,
)
from shardwise.kernels.recurrence import Recurrence, Tokens
from shardwise.kernels.short_conv import short_conv
from shardwise.models.kinds import jet_block
from shardwise.parallel.neighbours import ContextNeighbours
from tests.kernels.selective_scan import test_chunked as of_selective_scan
from tests.kernels.state_space_duality import test_chunked as of_state_space_duality

WIDTH = 3
Tensors = list[torch.Tensor]


class Exchange:
    """Threads give something each and get what all have given."""

    def __init__(self, size: int) -> None:
        self.barrier, self.slots = Barrier(size, timeout=60), [None] * size

    def swap(self, rank: int, given: Any) -> list[Any]:
        self.slots[rank] = given
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything


class ThreadNeighbours(ContextNeighbours):
    """Neighbours that are threads."""

    def __init__(self, exchange: Exchange, rank: int, document_ids: torch.Tensor) -> None:
        self.exchange, self.rank, self.size = exchange, rank, len(exchange.slots)
        self.document_ids, self.isolated = document_ids, True

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, by: int) -> None:
        everything, sender = self.exchange.swap(self.rank, sent), self.rank - by
        if 0 <= sender < self.size:
            received.copy_(everything[sender])


def _delta_rule(decay_per_key: bool) -> Callable[[int, int], Tensors]:
    def inputs(rows: int, tokens: int) -> Tensors:
        generator = torch.Generator().manual_seed(tokens)

        def normal(*sizes: int) -> torch.Tensor:
            sizes = (rows, tokens, *sizes)
            return torch.randn(*sizes, generator=generator, dtype=torch.float64)

        decays = (2, 3) if decay_per_key else (2,)
        return [
            normal(2, 3),
            normal(2, 3),
            normal(2, 4),
            -normal(*decays).abs(),
            normal(2).sigmoid(),
        ]

    return inputs


KINDS: dict[str, tuple[Recurrence, Callable[[int, int], Tensors], tuple[int, ...]]] = {
    "gated delta rule": (gated_delta_rule.RECURRENCE, _delta_rule(False), ()),
    "kimi delta attention": (kimi_delta_attention.RECURRENCE, _delta_rule(True), ()),
    "mamba2": (
        state_space_duality.RECURRENCE,
        lambda rows, tokens: of_state_space_duality.inputs(tokens, rows)[:-1],
        of_state_space_duality.SHARED,
    ),
    "mamba": (
        selective_scan.RECURRENCE,
        lambda rows, tokens: of_selective_scan.inputs(tokens, rows)[:-1],
        of_selective_scan.SHARED,
    ),
}
"""A core, its inputs, and the places of those without tokens."""


def _results(kind: str, tokens: Tokens, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Return the outputs of the core and of two convolutions, and the gradients of the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    x = inputs[0].flatten(2)
    earlier, documents = tokens.earlier(x, WIDTH - 1)
    weight = torch.linspace(-1, 1, x.shape[2] * WIDTH, dtype=x.dtype).view(-1, WIDTH)
    convolved = short_conv(x, weight, None, "silu", earlier, documents)
    by_token = jet_block.convolution(tokens, x, x[..., None].sin() * weight, "silu")
    outs = [tokens.recur(KINDS[kind][0], *inputs), convolved, by_token]
    gradients = torch.autograd.grad(sum(out.square().sum() for out in outs), inputs)
    return [out.detach() for out in outs], list(gradients)


def _error(kind: str, stretch: int, size: int, lengths: list[list[int]]) -> float:
    """Return the largest difference between ranks of `stretch` tokens each and complete rows."""
    _, inputs_of, shared = KINDS[kind]
    num_tokens = stretch * size
    ids = torch.zeros(len(lengths), num_tokens, dtype=torch.int64)
    for row, of_row in zip(ids, lengths):
        for begin in accumulate(of_row):
            row[begin:] += 1
    inputs = inputs_of(len(lengths), num_tokens)
    expected_outs, expected_gradients = _results(kind, Tokens(ids), inputs)
    exchange = Exchange(size)

    def of_rank(rank: int) -> tuple[Tensors, Tensors]:
        neighbours = ThreadNeighbours(exchange, rank, ids)
        part = [x if i in shared else x.chunk(size, 1)[rank] for i, x in enumerate(inputs)]
        try:
            return _results(kind, Tokens(ids.chunk(size, 1)[rank], neighbours), part)
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        by_rank = list(threads.map(of_rank, range(size)))
    outs = [torch.cat(parts, 1) for parts in zip(*(outs for outs, _ in by_rank))]
    gradients = [
        sum(parts) if i in shared else torch.cat(parts, 1)
        for i, parts in enumerate(zip(*(gradients for _, gradients in by_rank)))
    ]
    pairs = zip([*outs, *gradients], [*expected_outs, *expected_gradients], strict=True)
    return max(
        float((result - other).abs().max() / other.abs().max().clamp(min=1))
        for result, other in pairs
    )


DOCUMENTS = st.lists(st.integers(1, 20), max_size=40)
"""Lengths of a row's documents; the last one fills the row."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(
    stretch=st.integers(WIDTH - 1, 9),
    size=st.integers(2, 5),
    lengths=st.lists(DOCUMENTS, min_size=1, max_size=2),
)
@example(stretch=4, size=4, lengths=[[4, 4, 4], [8]])  # each begins at a rank's first token
@example(stretch=4, size=4, lengths=[[3, 10], [2, 9, 3]])  # one has tokens of three ranks
@example(stretch=3, size=4, lengths=[[1] * 12, []])  # each token is a document; one fills the row
def test_drawn_rows_equal_complete_ones(kind, stretch, size, lengths):
    assert _error(kind, stretch, size, lengths) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_kept_across_a_border_is_seen(kind, monkeypatch):
    monkeypatch.setattr(ThreadNeighbours, "_into", lambda self, x: x)
    assert _error(kind, 4, 4, [[4, 4, 4], [8]]) > 1e-6


def _under_autocast(kind: str, size: int, enabled: bool) -> Tensors:
    """Return each rank's outputs of a core with float32 inputs."""
    _, inputs_of, shared = KINDS[kind]
    ids = torch.zeros(1, 5 * size, dtype=torch.int64)
    inputs = [x.float() for x in inputs_of(1, 5 * size)]
    exchange = Exchange(size)

    def of_rank(rank: int) -> torch.Tensor:
        neighbours = ThreadNeighbours(exchange, rank, ids)
        part = [x if i in shared else x.chunk(size, 1)[rank] for i, x in enumerate(inputs)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return Tokens(None, neighbours).recur(KINDS[kind][0], *part)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_ranks_pass_on_keep_32_bits_under_autocast(kind):
    for under, plain in zip(_under_autocast(kind, 4, True), _under_autocast(kind, 4, False)):
        torch.testing.assert_close(under, plain, rtol=0, atol=0)
