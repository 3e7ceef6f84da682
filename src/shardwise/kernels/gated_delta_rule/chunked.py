"""The gated delta rule, a chunk of C tokens at a time, as matrix products, with its own backward.

Let G_i be the sum of g up to token i of a chunk, and s the state before the chunk. The corrections
r_i = beta_i (v_i - what the state stores under k_i) solve a unit lower triangular system:

    r_i + sum_{j<i} beta_i (k_i . k_j) e^{G_i - G_j} r_j = beta_i v_i - beta_i e^{G_i} s^T k_i

What follows from them is kernels/delta_rule.py. Where a document begins, the decays over its border
are 0. The backward is the chain rule on these equations.
Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.kernels.delta_rule import ChunkedRule, InChunks, Span, back_to_states, heads_first
from shardwise.kernels.gated_delta_rule.naive import State
from shardwise.kernels.recurrence import LOG2_E, numbers_of


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, S, H], as the package does.

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0;
    `state` is that of the first token's document.
    """
    out, last = InChunks.apply(RULE, state, documents, q, k, v, g, beta)
    return out, last


class _DeltaChunks(NamedTuple):
    """The inputs of some chunks in float32 or float64, n chunks before all other dims."""

    q: torch.Tensor
    """[n, B, N, C, S], of length 1 / sqrt(S)."""
    k: torch.Tensor
    """[n, B, N, C, S], of length 1."""
    v: torch.Tensor
    """[n, B, N, C, H]."""
    beta: torch.Tensor
    """[n, B, N, C, 1]."""
    q_factor: torch.Tensor
    """Factor that each q was multiplied by: [n, B, N, C, 1]."""
    k_factor: torch.Tensor
    """Factor that each k was multiplied by: [n, B, N, C, 1]."""
    from_start: torch.Tensor
    """The share of the state before a chunk that is left at each token: [n, B, N, C, 1]."""
    between: torch.Tensor
    """The share of what token j has written that is left at token i, [..., i, j]; 0 if j > i."""
    to_end: torch.Tensor
    """The share of what each token has written that is left after its chunk: [n, B, N, C, 1]."""
    q_from_start: torch.Tensor
    """[n, B, N, C, S]."""
    k_from_start: torch.Tensor
    """[n, B, N, C, S]."""
    k_to_end: torch.Tensor
    """[n, B, N, C, S]."""
    apart: torch.Tensor | None
    """Whether tokens i and j are of two documents: [n, B, 1, i, j]; None: they never are."""

    @property
    def over(self) -> torch.Tensor:
        """The share of the state before a chunk that is left after it: [n, B, N, 1, 1]."""
        return self.from_start[..., -1:, :]


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    numbers: torch.Tensor | None,
    span: Span,
) -> _DeltaChunks:
    """Prepare the inputs of `gated_delta_rule` of a span."""
    q, k, v, beta = (heads_first(x, span) for x in (q, k, v, beta[..., None]))
    q_factor, k_factor = _one_over_length(q) * q.shape[-1] ** -0.5, _one_over_length(k)
    q, k = q * q_factor, k * k_factor
    if k.shape[2] < v.shape[2]:
        q, k, q_factor, k_factor = (
            x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, q_factor, k_factor)
        )
    # In float64: the decay between two tokens is a difference of sums that may reach hundreds.
    # In powers of 2; see power_of_e.
    total = heads_first(g.double()[..., None], span).cumsum(-2).mul_(LOG2_E)
    from_start, between, to_end = total, total - total.mT, total[..., -1:, :] - total
    apart = None
    if numbers is not None:
        here = heads_first(numbers[:, :, None, None], span)
        earlier = torch.cat([numbers[:, :1], numbers[:, :-1]], 1)
        before = heads_first(earlier[:, :, None, None], span)[..., :1, :]
        apart = here != here.mT
        from_start = from_start.masked_fill(here != before, -torch.inf)
        between.masked_fill_(apart, -torch.inf)
        to_end.masked_fill_(here != here[..., -1:, :], -torch.inf)
    from_start, between, to_end = (x.to(v.dtype).exp2_() for x in (from_start, between, to_end))
    # Of later tokens the exponents are positive, and some powers infinite.
    between.tril_()
    shares = from_start, between, to_end, q * from_start, k * from_start, k * to_end
    return _DeltaChunks(q, k, v, beta, q_factor, k_factor, *shares, apart)


def _alike(chunks: _DeltaChunks) -> torch.Tensor:
    """Return k_i . k_j times the share of token j that is left at token i: [n, B, N, C, C]."""
    # Not in place: checkpointing by operators keeps the product for the recomputation.
    return (chunks.k @ chunks.k.mT) * chunks.between


def _similar(chunks: _DeltaChunks, _: None) -> torch.Tensor:
    """Return q_i . k_j times the share of token j that is left at token i: [n, B, N, C, C]."""
    return (chunks.q @ chunks.k.mT) * chunks.between


def _inverse(chunks: _DeltaChunks, alike: torch.Tensor) -> torch.Tensor:
    """Return the inverse of the system's matrix, lower triangular: [n, B, N, C, C]."""
    size = alike.shape[-1]
    identity = torch.eye(size, dtype=alike.dtype, device=alike.device)
    # Of the matrix, only what is below the diagonal is read.
    return torch.linalg.solve_triangular(
        alike * chunks.beta, identity.expand_as(alike), upper=False, unitriangular=True
    )


def _solve(chunks: _DeltaChunks, _: None) -> tuple[torch.Tensor, ...]:
    """Return values [n, B, N, C, H] and reads [n, B, N, C, S]; see `pass_on`."""
    return _solved(chunks, _inverse(chunks, _alike(chunks)))


def _solved(chunks: _DeltaChunks, inverse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    by_beta = inverse * chunks.beta.mT
    return by_beta @ chunks.v, by_beta @ chunks.k_from_start


def _gradients(
    inputs: Sequence[torch.Tensor],
    chunks: _DeltaChunks,
    span: Span,
    before: torch.Tensor,
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """See ChunkedRule."""
    grads, grad_state = _backward(chunks, before, grad_out, grad_state)
    grad_q, grad_k, grad_v, grad_g, grad_beta = grads
    keys, size = inputs[1].shape[2:]
    grad_q = _through_unit(grad_q, chunks.q, chunks.q_factor, size**-0.5, keys)
    grad_k = _through_unit(grad_k, chunks.k, chunks.k_factor, 1.0, keys)
    return (grad_q, grad_k, grad_v, grad_g[..., 0], grad_beta[..., 0]), grad_state


def _backward(
    chunks: _DeltaChunks, before: torch.Tensor, grad_out: torch.Tensor, grad_last: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the gradients of q, k, v, g and beta of a span, and of the state before it.

    `before` [n, B, N, S, H]: the state before each chunk;
    `grad_last` [B, N, S, H]: the gradient of the state after the last one.
    """
    q, k, v, beta, between = chunks.q, chunks.k, chunks.v, chunks.beta, chunks.between
    similar, alike = (q @ k.mT).mul_(between), _alike(chunks)
    inverse = _inverse(chunks, alike)
    values, reads = _solved(chunks, inverse)
    grad_after, grad_corrections, grad_first = back_to_states(
        chunks, reads, similar, grad_out, grad_last
    )
    corrections = values - reads @ before

    # Through the outputs and the states after the chunks.
    grad_q_from_start = grad_out @ before.mT
    grad_similar = grad_out @ corrections.mT
    grad_k_to_end = corrections @ grad_after.mT

    # Through the system, whose right side is beta (v - k_from_start @ before). The gradient of its
    # matrix is minus that of the right side times the corrections.
    grad_right = inverse.mT @ grad_corrections
    minus = -grad_right
    grad_system = (minus @ corrections.mT).tril_(-1)
    grad_k_from_start = minus @ before.mT  # without beta
    grad_alike = grad_system * alike  # times the decay, without beta
    by_key = (grad_k_from_start * chunks.k_from_start).sum(-1, keepdim=True)

    grad_beta = (grad_right * v).sum(-1, keepdim=True) + by_key + grad_alike.sum(-1, keepdim=True)
    # Sums of g: each decay e^{G_i - G_j} adds its gradient times itself to i and takes it from j.
    # In float64, so that what both ends of a later pair give to the gradient of g cancels.
    grad_pairs = grad_alike.mul_(beta).addcmul_(grad_similar, similar)
    grad_total = grad_pairs.sum(-1, keepdim=True, dtype=torch.float64)
    grad_total -= grad_pairs.sum(-2, dtype=torch.float64)[..., None]
    at_end = (grad_k_to_end * chunks.k_to_end).sum(-1, keepdim=True).double()
    grad_total += (grad_q_from_start * chunks.q_from_start).sum(-1, keepdim=True)
    grad_total += by_key * beta - at_end
    over = (grad_after * before).sum((-2, -1), keepdim=True) * chunks.over
    grad_total[..., -1:, :] += at_end.sum(-2, keepdim=True) + over
    if chunks.apart is None:
        grad_g = grad_total.flip(-2).cumsum(-2).flip(-2)
    else:
        # Within each document, so that not even a rounding error reaches the one before.
        grad_g = (~chunks.apart).double().triu_() @ grad_total

    grad_system.mul_(between).mul_(beta)
    grad_similar.mul_(between)
    grad_q = grad_q_from_start.mul_(chunks.from_start) + grad_similar @ k
    grad_k = grad_k_from_start.mul_(chunks.from_start * beta).addcmul_(grad_k_to_end, chunks.to_end)
    grad_k += grad_similar.mT @ q
    grad_k += (grad_system + grad_system.mT) @ k
    return (grad_q, grad_k, grad_right * beta, grad_g, grad_beta), grad_first


def _one_over_length(x: torch.Tensor) -> torch.Tensor:
    """Return what `unit` multiplies the vectors of x [..., S] by: [..., 1]."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _through_unit(
    grad_y: torch.Tensor, y: torch.Tensor, factor: torch.Tensor, length: float, num_heads: int
) -> torch.Tensor:
    """Return the gradient of x [n, B, K, C, S], given that of y = x * factor, per head N.

    The factor is `length` over the length of x.
    """
    along = (grad_y * y).sum(-1, keepdim=True).div_(length**2)
    grad_x = torch.addcmul(grad_y, y, along, value=-1).mul_(factor)
    if num_heads == grad_x.shape[2]:
        return grad_x
    return grad_x.unflatten(2, (num_heads, -1)).sum(3)  # heads that share a key


# No product of pairs is kept from the one to the other: it would take memory in between.
RULE = ChunkedRule(numbers_of, _chunks, lambda chunks: None, _solve, _similar, _gradients)
summary, grad_before = RULE.summary, RULE.grad_before
