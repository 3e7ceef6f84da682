"""The gated delta rule, a chunk of C tokens at a time, as matrix products, with its own backward.

Let G_i be the sum of g up to token i of a chunk, and s the state before the chunk. The corrections
r_i = beta_i (v_i - what the state stores under k_i) solve a unit lower triangular system:

    r_i + sum_{j<i} beta_i (k_i . k_j) e^{G_i - G_j} r_j = beta_i v_i - beta_i e^{G_i} s^T k_i

The output is a sum of what the state and what the corrections of the chunk give to each token, and
the next state is linear in both. Where a document begins, the decays over its border are 0.

The backward is the chain rule on these equations, from the last chunk to the first. It keeps the
inputs and the state before each chunk, and computes the rest again. A chunk at a time fits into a
CPU's cache, which makes it faster than products over all chunks at once.
Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.gated_delta_rule.naive import State, begins, unit, wide
from shardwise.kernels.recurrence import Summary

CHUNK = 64
"""C: tokens of a chunk."""


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
    out, last = _GatedDeltaRule.apply(q, k, v, g, beta, state, documents)
    return out, last


def summary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor | None,
) -> Summary:
    """Return the map of all tokens: matrices [B, N, S, S] and states [B, N, S, H]."""
    # The state and the matrix are columns of one state, of which only the former gets values.
    batch, _, heads, value_size = v.shape
    dtype, key_size = torch.promote_types(v.dtype, torch.float32), k.shape[-1]
    matrix = torch.eye(key_size, dtype=dtype, device=v.device).expand(batch, heads, -1, -1)
    s = torch.cat([v.new_zeros(batch, heads, key_size, value_size, dtype=dtype), matrix], -1)
    numbers = _numbers(documents)
    with torch.autocast(v.device.type, enabled=False):
        for start in range(0, v.shape[1], CHUNK):
            chunk = _chunk(k, k, v, g, beta, numbers, start)  # no query is read
            values, reads = _solve(chunk, _alike(chunk))
            corrections = F.pad(values, (0, key_size)) - reads @ s
            s = s * chunk.over + (chunk.k * chunk.to_end).mT @ corrections
    after, transition = s.split([value_size, key_size], -1)
    return Summary(transition.contiguous(), after.contiguous())


def of_before(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    of_out: torch.Tensor,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [B, N, S, H] of the first state that the gradient of outputs gives."""
    numbers = _numbers(documents)
    of_state = torch.zeros((), dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
    with torch.autocast(v.device.type, enabled=False):
        for start in reversed(range(0, v.shape[1], CHUNK)):
            chunk = _chunk(q, k, v, g, beta, numbers, start)
            of_chunk = _heads_first(of_out, start)
            _, reads = _solve(chunk, _alike(chunk))
            similar = (chunk.q @ chunk.k.mT).mul_(chunk.between)
            of_corrections = similar.mT @ of_chunk
            if of_state.ndim:
                of_corrections += (chunk.k * chunk.to_end) @ of_state
            of_outputs = (chunk.q * chunk.from_start).mT @ of_chunk
            of_state = of_outputs + of_state * chunk.over - reads.mT @ of_corrections
    return of_state


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: State,
        documents: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, tokens, heads, value_size = v.shape
        if state is None:
            dtype = torch.promote_types(v.dtype, torch.float32)
            s = v.new_zeros(batch, heads, k.shape[-1], value_size, dtype=dtype)
        else:
            s = wide(state)
        numbers, states, out = _numbers(documents), [], torch.empty_like(v)
        # Autocast is off: the state has 32 bits, whatever dtype the products around it have.
        with torch.autocast(v.device.type, enabled=False):
            for start in range(0, tokens, CHUNK):
                states.append(s)
                chunk = _chunk(q, k, v, g, beta, numbers, start)
                values, reads = _solve(chunk, _alike(chunk))
                corrections = values - reads @ s
                scores = (chunk.q @ chunk.k.mT).mul_(chunk.between)
                chunk_out = (chunk.q * chunk.from_start) @ s + scores @ corrections
                out[:, start : start + CHUNK] = chunk_out.transpose(1, 2)
                s = s * chunk.over + (chunk.k * chunk.to_end).mT @ corrections
        ctx.state_dtype = s.dtype if state is None else state.dtype
        ctx.save_for_backward(q, k, v, g, beta, documents, *states)
        return out, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, documents, *states = ctx.saved_tensors
        of_out, of_last = gradients
        numbers, of_state = _numbers(documents), wide(of_last)
        of_inputs = [torch.empty_like(x) for x in (q, k, v, g, beta)]
        with torch.autocast(v.device.type, enabled=False):
            for start in reversed(range(0, v.shape[1], CHUNK)):
                chunk = _chunk(q, k, v, g, beta, numbers, start)
                of_chunk, of_state = _backward(
                    chunk, states.pop(), _heads_first(of_out, start), of_state
                )
                of_q, of_k, of_v, of_g, of_beta = of_chunk
                of_q = _through_unit(of_q, q, start) * q.shape[-1] ** -0.5
                of_k = _through_unit(of_k, k, start)
                of_slices = (of_q, of_k, of_v, of_g[..., 0], of_beta[..., 0])
                for of_x, of_slice in zip(of_inputs, of_slices):
                    of_x[:, start : start + CHUNK] = of_slice.transpose(1, 2)
        if not ctx.needs_input_grad[5]:
            return *of_inputs, None, None
        return *of_inputs, of_state.to(ctx.state_dtype), None


class _Chunk(NamedTuple):
    """The inputs of a chunk in float32 or float64, with heads before tokens."""

    q: torch.Tensor
    """[B, N, C, S], of length 1 / sqrt(S)."""
    k: torch.Tensor
    """[B, N, C, S], of length 1."""
    v: torch.Tensor
    """[B, N, C, H]."""
    beta: torch.Tensor
    """[B, N, C, 1]."""
    from_start: torch.Tensor
    """The share of the state before the chunk that is left at each token: [B, N, C, 1]."""
    between: torch.Tensor
    """The share of what token j has written that is left at token i, [..., i, j]; 0 if j > i."""
    to_end: torch.Tensor
    """The share of what each token has written that is left after the chunk: [B, N, C, 1]."""
    apart: torch.Tensor | None
    """Whether tokens i and j are of two documents: [B, 1, i, j]; None: they never are."""

    @property
    def over(self) -> torch.Tensor:
        """The share of the state before the chunk that is left after it: [B, N, 1, 1]."""
        return self.from_start[..., -1:, :]


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    numbers: torch.Tensor | None,
    start: int,
) -> _Chunk:
    """Prepare the inputs of `gated_delta_rule` from token `start` on."""
    q, k, v, g, beta = (_heads_first(x, start) for x in (q, k, v, g, beta))
    q, k, v, beta = (wide(x) for x in (q, k, v, beta[..., None]))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    # In float64: the decay between two tokens is a difference of sums that may reach hundreds.
    total = g.double()[..., None].cumsum(-2)
    from_start, to_end = total, total[..., -1:, :] - total
    # Masked before exp, which for later tokens would overflow.
    is_later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=g.device)
    between = (total - total.mT).masked_fill_(is_later.triu_(1), -torch.inf)
    apart = None
    if numbers is not None:
        here = numbers[:, None, start : start + CHUNK, None]
        before = numbers[:, None, max(start - 1, 0), None, None]
        from_start = from_start.masked_fill(here != before, -torch.inf)
        apart = here != here.mT
        between.masked_fill_(apart, -torch.inf)
        to_end.masked_fill_(here != here[..., -1:, :], -torch.inf)
    shares = (x.to(v.dtype).exp_() for x in (from_start, between, to_end))
    return _Chunk(q, k, v, beta, *shares, apart)


def _alike(chunk: _Chunk) -> torch.Tensor:
    """Return k_i . k_j times the share of token j that is left at token i: [B, N, C, C]."""
    return (chunk.k @ chunk.k.mT).mul_(chunk.between)


def _solve(chunk: _Chunk, alike: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return values [B, N, C, H] and reads [B, N, C, S]: corrections are values - reads @ s."""
    right_side = torch.cat([chunk.v, chunk.k * chunk.from_start], -1).mul_(chunk.beta)
    # Of the matrix, only what is below the diagonal is read.
    solution = torch.linalg.solve_triangular(
        alike * chunk.beta, right_side, upper=False, unitriangular=True
    )
    return solution.split([chunk.v.shape[-1], chunk.k.shape[-1]], -1)


def _backward(
    chunk: _Chunk, before: torch.Tensor, of_out: torch.Tensor, of_after: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the gradients of q, k, v, g and beta of a chunk, and of the state before it.

    `of_x` is the gradient of x. `before`: the state before the chunk; `of_after`: the gradient of
    the state after it; both are [B, N, S, H].
    """
    q, k, v, beta, from_start, between, to_end, apart = chunk
    similar, alike = (q @ k.mT).mul_(between), _alike(chunk)
    values, reads = _solve(chunk, alike)
    corrections = values - reads @ before
    q_from_start, k_to_end = q * from_start, k * to_end

    # Through the output and the state after the chunk.
    of_corrections = similar.mT @ of_out + k_to_end @ of_after
    of_q_from_start = of_out @ before.mT
    of_similar = of_out @ corrections.mT
    of_k_to_end = corrections @ of_after.mT
    of_before = q_from_start.mT @ of_out + of_after * chunk.over - reads.mT @ of_corrections

    # Through the system. Its gradient is minus that of the right side times the corrections.
    of_solution = torch.cat([of_corrections, -of_corrections @ before.mT], -1)
    of_right = torch.linalg.solve_triangular(
        (alike * beta).mT, of_solution, upper=True, unitriangular=True
    )
    of_system = -(of_right @ torch.cat([values, reads], -1).mT).tril_(-1)
    of_right_v, of_right_k = of_right.split([v.shape[-1], k.shape[-1]], -1)
    of_right_k = of_right_k * from_start
    of_alike = of_system * alike  # times the decay, without beta
    by_key = (of_right_k * k).sum(-1, keepdim=True)

    of_beta = (of_right_v * v).sum(-1, keepdim=True) + by_key + of_alike.sum(-1, keepdim=True)
    # Sums of g: each decay e^{G_i - G_j} adds its gradient times itself to i and takes it from j.
    # In float64, so that what both ends of a later pair give to the gradient of g cancels.
    of_pairs = of_alike.mul_(beta) + of_similar * similar
    of_total = of_pairs.sum(-1, keepdim=True, dtype=torch.float64)
    of_total -= of_pairs.sum(-2, dtype=torch.float64)[..., None]
    at_end = (of_k_to_end * k_to_end).sum(-1, keepdim=True).double()
    of_total += (of_q_from_start * q_from_start).sum(-1, keepdim=True) + by_key * beta - at_end
    over = (of_after * before).sum((-2, -1), keepdim=True) * chunk.over
    of_total[..., -1:, :] += at_end.sum(-2, keepdim=True) + over
    if apart is None:
        of_g = of_total.flip(-2).cumsum(-2).flip(-2)
    else:
        # Within each document, so that not even a rounding error reaches the one before.
        of_g = (~apart).double().triu_() @ of_total

    of_system.mul_(between).mul_(beta)
    of_similar.mul_(between)
    of_q = of_q_from_start * from_start + of_similar @ k
    of_k = of_right_k * beta + of_k_to_end * to_end + of_similar.mT @ q
    of_k += (of_system + of_system.mT) @ k
    return (of_q, of_k, of_right_v * beta, of_g, of_beta), of_before


def _numbers(documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return the number of each token's document in its row, from 0: [B, T]."""
    return None if documents is None else begins(documents).cumsum(1)


def _heads_first(x: torch.Tensor, start: int) -> torch.Tensor:
    """Return a chunk of x [B, T, N, ...] as [B, N, C, ...]; the last chunk may be shorter."""
    return wide(x[:, start : start + CHUNK].transpose(1, 2)).contiguous()


def _through_unit(of_unit: torch.Tensor, x: torch.Tensor, start: int) -> torch.Tensor:
    """Return the gradient of a chunk of x [B, T, K, S], given that of its `unit` [B, N, C, S]."""
    x = _heads_first(x, start)
    of_unit = of_unit.unflatten(1, (x.shape[1], -1)).sum(2)  # heads that share a key
    shrunk = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    direction = x * shrunk
    return (of_unit - direction * (of_unit * direction).sum(-1, keepdim=True)) * shrunk
