"""Kimi Delta Attention, a chunk of C tokens at a time, as matrix products, with its own backward.

Let d_ij [S] be what a state keeps from token j to token i of a chunk, the product of e^g over the
tokens after j up to i, and d_i what it keeps from before the chunk to token i; s is the state
before the chunk. The corrections r_i = beta_i (v_i - what the state stores under k_i) solve a unit
lower triangular system:

    r_i + sum_{j<i} beta_i ((k_i * d_ij) . k_j) r_j = beta_i v_i - beta_i s^T (k_i * d_i)

What follows from them is kernels/delta_rule.py. d_ij has a value for each channel, so that
(k_i * d_ij) . k_j is no product of matrices. It is one between two halves of a block: with a border
between the halves, d_ij is what is kept from j to the border times what is kept from the border to
i. So a chunk is halved until a half is one token. No decay is divided by another one: nothing
overflows, however strong the decay is, and a decay of 0 is a decay like any other; it stands before
the first token of a document.

The backward is the chain rule on these equations. The last chunk is padded with tokens that do
nothing.
Source: Kimi Team, "Kimi Linear", arXiv 2510.26692, section 3; the halves are this project's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from shardwise.kernels.delta_rule import (
    CHUNK,
    ChunkedRule,
    InChunks,
    Span,
    back_to_states,
    heads_first,
)
from shardwise.kernels.gated_delta_rule.naive import State, unit
from shardwise.kernels.recurrence import begins, power_of_e


def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, S, H], as the package does."""
    out, last = InChunks.apply(RULE, state, documents, q, k, v, g, beta)
    return out, last


class _Halves(NamedTuple):
    """Shares kept between the tokens of blocks of 2 h tokens and the borders of their halves."""

    to_border: torch.Tensor
    """From each token of the first halves to the border: [n, B, N, C / 2h, h, S]."""
    from_border: torch.Tensor
    """From the border to each token of the second halves: [n, B, N, C / 2h, h, S]."""


class _KimiChunks(NamedTuple):
    """The inputs of some chunks in float32 or float64, n chunks before all other dims."""

    q: torch.Tensor
    """[n, B, N, C, S], of length 1 / sqrt(S)."""
    k: torch.Tensor
    """[n, B, N, C, S], of length 1."""
    v: torch.Tensor
    """[n, B, N, C, H]."""
    beta: torch.Tensor
    """[n, B, N, C, 1]."""
    halves: list[_Halves]
    """For h = 1, 2, 4, ..., C / 2."""
    from_start: torch.Tensor
    """The share of the state before a chunk that is left at each token: [n, B, N, C, S]."""
    to_end: torch.Tensor
    """The share of what each token has written that is left after its chunk: [n, B, N, C, S]."""

    @property
    def q_from_start(self) -> torch.Tensor:
        """[n, B, N, C, S]."""
        return self.q * self.from_start

    @property
    def k_to_end(self) -> torch.Tensor:
        """[n, B, N, C, S]."""
        return self.k * self.to_end

    @property
    def over(self) -> torch.Tensor:
        """The share of the state before a chunk that is left after it: [n, B, N, S, 1]."""
        return self.from_start[..., -1, :, None]


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor | None,
    span: Span,
) -> _KimiChunks:
    """Prepare the inputs of `kimi_delta_attention` of a span."""
    q, k, v, g, beta = (_padded(x, span) for x in (q, k, v, g, beta[..., None]))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    to_token = power_of_e(g)  # from the start of a block up to each token, that one too
    if starts is not None:
        to_token = to_token * (1 - _padded(starts, span))
    to_end, halves = torch.ones_like(to_token), []
    for _ in range(CHUNK.bit_length() - 1):
        size = 2 ** len(halves)
        first, second = to_token.unflatten(-2, (-1, 2, size)).unbind(-3)
        first_to_end, second_to_end = to_end.unflatten(-2, (-1, 2, size)).unbind(-3)
        halves.append(_Halves(first_to_end, second))
        to_token = torch.stack([first, second * first[..., -1:, :]], -3).flatten(-4, -2)
        to_end = torch.stack([first_to_end * second[..., -1:, :], second_to_end], -3)
        to_end = to_end.flatten(-4, -2)
    return _KimiChunks(q, k, v, beta, halves, to_token, to_end)


class _Pairs(NamedTuple):
    """Products of a chunk's keys and queries with its keys, by channels that decay."""

    alike: torch.Tensor
    """(k_i * d_ij) . k_j for j < i, and 0 for others: [n, B, N, C, C]."""
    similar: torch.Tensor
    """(q_i * d_ij) . k_j for j <= i, and 0 for others: [n, B, N, C, C]."""
    factors: list[tuple[torch.Tensor, torch.Tensor]]
    """For each of the chunk's halves, keys over queries times what is kept from the border, and
    keys times what is kept to it: [n, B, N, C / 2h, 2h, S], [n, B, N, C / 2h, h, S]."""


def _pairs(chunks: _KimiChunks) -> _Pairs:
    """Multiply each pair of tokens, two halves of a block at a time."""
    q, k = chunks.q, chunks.k
    products = k.new_zeros(*k.shape[:3], 2, CHUNK, CHUNK)
    factors = []
    for to_border, from_border in chunks.halves:
        size = from_border.shape[-2]
        earlier, later = k.unflatten(-2, (-1, 2, size)).unbind(-3)
        asking = q.unflatten(-2, (-1, 2, size))[..., 1, :, :]
        rows = torch.cat([later * from_border, asking * from_border], -2)
        columns = earlier * to_border
        _between_halves(products, size).copy_((rows @ columns.mT).unflatten(-2, (2, size)))
        factors.append((rows, columns))
    alike, similar = products.select(-3, 0), products.select(-3, 1)
    similar.diagonal(0, -2, -1).copy_((q * k).sum(-1))
    return _Pairs(alike, similar, factors)


def _between_halves(products: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view of products [n, B, N, 2, C, C] between halves, [n, B, N, C / 2h, 2, h, h].

    Rows are tokens of the second half of a block, columns those of its first half.
    """
    blocks = products.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    return blocks[..., 1, :, :, 0, :].diagonal(0, -4, -2).movedim(-1, -4)


def _solve(chunks: _KimiChunks, pairs: _Pairs) -> tuple[torch.Tensor, ...]:
    """Return values [n, B, N, C, H] and reads [n, B, N, C, S]; see `pass_on`."""
    right_side = torch.cat([chunks.v, chunks.k * chunks.from_start], -1).mul_(chunks.beta)
    solution = torch.linalg.solve_triangular(
        pairs.alike * chunks.beta, right_side, upper=False, unitriangular=True
    )
    return solution.split([chunks.v.shape[-1], chunks.k.shape[-1]], -1)


def _similar(chunks: _KimiChunks, pairs: _Pairs) -> torch.Tensor:
    return pairs.similar


def _gradients(
    inputs: Sequence[torch.Tensor],
    chunks: _KimiChunks,
    span: Span,
    before: torch.Tensor,
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """See ChunkedRule."""
    grads, grad_state = _backward(chunks, before, grad_out, grad_state)
    grad_q, grad_k, grad_v, grad_g, grad_beta = grads
    q, k, *_ = inputs
    grad_q = _through_unit(grad_q, q, span) * q.shape[-1] ** -0.5
    return (grad_q, _through_unit(grad_k, k, span), grad_v, grad_g, grad_beta[..., 0]), grad_state


def _backward(
    chunks: _KimiChunks, before: torch.Tensor, grad_out: torch.Tensor, grad_last: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the gradients of q, k, v, g and beta of some chunks, and of the state before them.

    `before` [n, B, N, S, H]: the states before the chunks;
    `grad_last` [B, N, S, H]: the gradient of the state after the last one.
    """
    q, k, v, beta, halves, from_start, to_end = chunks
    alike, similar, factors = pairs = _pairs(chunks)
    values, reads = _solve(chunks, pairs)
    corrections = values - reads @ before
    grad_similar = grad_out @ corrections.mT
    grad_after, grad_corrections, grad_first = back_to_states(
        chunks, reads, similar, grad_out, grad_last
    )

    # Through the system. Its gradient is minus that of the right side times the corrections.
    grad_solution = torch.cat([grad_corrections, -grad_corrections @ before.mT], -1)
    grad_right = torch.linalg.solve_triangular(
        (alike * beta).mT, grad_solution, upper=True, unitriangular=True
    )
    grad_system = -(grad_right @ torch.cat([values, reads], -1).mT)
    grad_right_v, grad_right_k = grad_right.split([v.shape[-1], k.shape[-1]], -1)
    grad_right_k = grad_right_k * from_start
    grad_beta = (grad_right_v * v).sum(-1, keepdim=True) + (grad_right_k * k).sum(-1, keepdim=True)
    grad_beta += (grad_system * alike).sum(-1, keepdim=True)

    # The gradients of keys as later tokens of a pair, which decays reach, and as earlier ones. A
    # decay from token j to token i adds its gradient times itself to all g after j up to i. Each
    # block collects what reaches over all of it: so every term of a gradient of g has the decay
    # e^g in it, and no difference of large terms stands for a small one.
    grad_q = (grad_out @ before.mT).mul_(from_start)
    grad_later, grad_earlier = grad_right_k.mul_(beta), (corrections @ grad_after.mT).mul_(to_end)
    grad_g = (grad_after * before).sum(-1)[..., None, :] * from_start[..., -1:, :]
    grad_products = torch.stack([grad_system * beta, grad_similar], -3)
    for (to_border, from_border), (rows, columns) in zip(reversed(halves), reversed(factors)):
        size = from_border.shape[-2]
        first, second = (
            [x.unflatten(-2, (-1, 2, size))[..., half, :, :] for x in tensors]
            for half, tensors in enumerate([(k, grad_earlier), (q, grad_q, k, grad_later)])
        )
        over_first = (second[0] * second[1]).add_(second[2] * second[3]).sum(-2)
        over_second = (first[0] * first[1]).sum(-2)
        grad_g = torch.stack([grad_g + over_first, grad_g + over_second], -2).flatten(-3, -2)
        grad_block = _between_halves(grad_products, size).flatten(-3, -2)
        grad_keys, grad_queries = (grad_block @ columns).split(size, -2)
        second[3] += grad_keys * from_border
        second[1] += grad_queries * from_border
        first[1] += (grad_block.mT @ rows) * to_border
    grad_g = grad_g + q * grad_q + k * grad_later

    grad_same = grad_similar.diagonal(0, -2, -1)[..., None]
    grad_k = grad_later + grad_earlier + grad_same * q
    return (grad_q + grad_same * k, grad_k, grad_right_v * beta, grad_g, grad_beta), grad_first


def _starts(documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return 1 for tokens that begin a document and 0 for others: [B, T, 1, 1]."""
    return None if documents is None else begins(documents)[:, :, None, None].float()


def _padded(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span of x [B, T, N, ...] as [n, B, N, C, ...], padded with zeros."""
    return F.pad(heads_first(x, span), (0, 0, 0, CHUNK - span.length))


def _through_unit(grad_unit: torch.Tensor, x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the gradient of a span of x [B, T, N, S], given that of its `unit`."""
    x = _padded(x, span)
    shrunk = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    direction = x * shrunk
    return (grad_unit - direction * (grad_unit * direction).sum(-1, keepdim=True)) * shrunk


RULE = ChunkedRule(_starts, _chunks, _pairs, _solve, _similar, _gradients, _padded)
summary, grad_before = RULE.summary, RULE.grad_before
