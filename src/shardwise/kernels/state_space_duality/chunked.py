"""The scan of Mamba2, a chunk of C tokens at a time, as matrix products, with its own backward.

Let G_i be the sum of dt a up to token i of a chunk, u = dt x what the tokens write, and s the state
before the chunk. The outputs and the state after the chunk are

    y_i = sum_{j<=i} (c_i . b_j) e^{G_i - G_j} u_j + e^{G_i} s c_i + d x_i
    s' = e^{G_C} s + sum_j e^{G_C - G_j} u_j b_j^T

The heads that share b and c stand side by side, so that all their products with b, c and the state
are one. Where a document begins, the decays over its border are 0.

The backward is the chain rule on these equations, from the last chunk to the first. It keeps the
inputs and the state before each chunk, and computes the rest again.
Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.recurrence import Summary, numbers_of, power_of_e, wide

CHUNK = 64
"""C: tokens of a chunk."""
ALL = slice(None)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, H, S], as the package does."""
    out, last = _Mamba2Scan.apply(x, dt, a, b, c, d, state, documents)
    return out, last


def summary(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    documents: torch.Tensor | None,
) -> Summary:
    """Return the map of all tokens: factors [B, N, 1, 1] and states [B, N, H, S]."""
    with torch.autocast(x.device.type, enabled=False):
        # No sum within the tokens is needed: they are one chunk.
        chunk = _chunk(x, dt, a, b, c, numbers_of(documents), ALL)
        after = (chunk.written * chunk.to_end).flatten(3).mT @ chunk.b
    return Summary(chunk.over.flatten(1, 2), after.view(*_state_shape(x, b)))


def grad_before(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    grad_out: torch.Tensor,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [B, N, H, S] of the first state that the gradient of outputs gives."""
    with torch.autocast(x.device.type, enabled=False):
        chunk = _chunk(x, dt, a, b, c, numbers_of(documents), ALL)
        grad_reads = _by_group(grad_out, b.shape[2], ALL) * chunk.from_start
        return (grad_reads.flatten(3).mT @ chunk.c).view(*_state_shape(x, b))


class _Mamba2Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        state: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = b.shape[2]
        if state is None:
            dtype = torch.promote_types(x.dtype, torch.float32)
            s = x.new_zeros(_state_shape(x, b), dtype=dtype)
        else:
            s = wide(state)
        numbers, states, out = numbers_of(documents), [], torch.empty_like(x)
        residual = wide(d).view(groups, 1, -1, 1)
        # Autocast is off: the state has 32 bits, whatever dtype the products around it have.
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, x.shape[1], CHUNK):
                states.append(s)
                tokens = slice(start, start + CHUNK)
                chunk = _chunk(x, dt, a, b, c, numbers, tokens)
                between, _ = _between(chunk, numbers, tokens)
                before = s.unflatten(1, (groups, -1)).flatten(2, 3)
                # Products are not changed in place: selective checkpointing may keep them.
                reads = (chunk.c @ before.mT).unflatten(3, chunk.x.shape[3:])
                chunk_out = reads * chunk.from_start
                scores = between.mul_((chunk.c @ chunk.b.mT)[:, :, None])
                chunk_out += (scores @ chunk.written.transpose(2, 3)).transpose(2, 3)
                chunk_out.addcmul_(chunk.x, residual)
                out[:, tokens] = chunk_out.transpose(1, 2).flatten(2, 3)
                added = (chunk.written * chunk.to_end).flatten(3).mT @ chunk.b
                s = torch.addcmul(added.view_as(s), s, chunk.over.flatten(1, 2))
        ctx.state_dtype = s.dtype if state is None else state.dtype
        ctx.save_for_backward(x, dt, a, b, c, d, documents, *states)
        return out, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, dt, a, b, c, d, documents, *states = ctx.saved_tensors
        grad_out, grad_last = gradients
        groups, numbers = b.shape[2], numbers_of(documents)
        grad_state = wide(grad_last)
        grad_x, grad_dt, grad_b, grad_c = (torch.empty_like(y) for y in (x, dt, b, c))
        grad_a, grad_d = (wide(y).new_zeros(groups, y.numel() // groups) for y in (a, d))
        residual = wide(d).view(groups, 1, -1, 1)
        with torch.autocast(x.device.type, enabled=False):
            for start in reversed(range(0, x.shape[1], CHUNK)):
                tokens = slice(start, start + CHUNK)
                chunk = _chunk(x, dt, a, b, c, numbers, tokens)
                grad_chunk = _by_group(grad_out, groups, tokens)
                between, apart = _between(chunk, numbers, tokens)
                grad_slices, grad_state = _backward(
                    chunk, between, apart, states.pop(), grad_chunk, grad_state
                )
                grad_written, grad_decay, grad_chunk_b, grad_chunk_c = grad_slices
                grad_x_slice = (grad_written * chunk.dt).addcmul_(grad_chunk, residual)
                grad_dt_slice = (grad_written * chunk.x).sum(-1) + grad_decay * chunk.a[..., 0]
                grad_a += (grad_decay * chunk.dt[..., 0]).sum((0, 2))
                grad_d += (grad_chunk * chunk.x).sum((0, 2, 4))
                grad_x[:, tokens] = grad_x_slice.transpose(1, 2).flatten(2, 3)
                grad_dt[:, tokens] = grad_dt_slice.transpose(1, 2).flatten(2, 3)
                grad_b[:, tokens] = grad_chunk_b.transpose(1, 2)
                grad_c[:, tokens] = grad_chunk_c.transpose(1, 2)
        grad_inputs = (
            grad_x,
            grad_dt,
            grad_a.flatten().to(a.dtype),
            grad_b,
            grad_c,
            grad_d.flatten().to(d.dtype),
        )
        if not ctx.needs_input_grad[6]:
            return *grad_inputs, None, None
        return *grad_inputs, grad_state.to(ctx.state_dtype), None


class _DualityChunk(NamedTuple):
    """The inputs of a chunk in float32 or float64; N heads are K groups of M that share b and c."""

    x: torch.Tensor
    """[B, K, C, M, H]."""
    dt: torch.Tensor
    """[B, K, C, M, 1]."""
    a: torch.Tensor
    """[K, 1, M, 1]."""
    b: torch.Tensor
    """[B, K, C, S]."""
    c: torch.Tensor
    """[B, K, C, S]."""
    written: torch.Tensor
    """dt x: [B, K, C, M, H]."""
    total: torch.Tensor
    """The sum of dt a from the first token of the chunk to each: [B, K, C, M, 1] float64."""
    from_start: torch.Tensor
    """The share of the state before the chunk that is left at each token: [B, K, C, M, 1]."""
    to_end: torch.Tensor
    """The share of what each token has written that is left after the chunk: [B, K, C, M, 1]."""

    @property
    def over(self) -> torch.Tensor:
        """The share of the state before the chunk that is left after it: [B, K, M, 1, 1]."""
        return self.from_start[:, :, -1, :, :, None]


def _chunk(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    numbers: torch.Tensor | None,
    tokens: slice,
) -> _DualityChunk:
    """Prepare some tokens of the inputs of `mamba2_scan`."""
    groups = b.shape[2]
    x, dt = (_by_group(y, groups, tokens) for y in (x, dt[..., None]))
    b, c = (wide(y[:, tokens].transpose(1, 2)) for y in (b, c))
    a = wide(a).view(groups, 1, -1, 1)
    # In float64: the decay between two tokens is a difference of sums that may reach hundreds. What
    # leaves less than e^-10,000, which is 0, counts as that, so that sums over it stay precise.
    total = (dt.double() * a.double()).clamp(min=-1e4).cumsum(2)
    from_start, to_end = total, total[:, :, -1:] - total
    if numbers is not None:
        here = numbers[:, None, tokens, None, None]
        before = numbers[:, max((tokens.start or 0) - 1, 0), None, None, None, None]
        from_start = from_start.masked_fill(here != before, -torch.inf)
        to_end.masked_fill_(here != here[:, :, -1:], -torch.inf)
    from_start, to_end = (power_of_e(y.to(x.dtype)) for y in (from_start, to_end))
    return _DualityChunk(x, dt, a, b, c, x * dt, total, from_start, to_end)


def _between(
    chunk: _DualityChunk, numbers: torch.Tensor | None, tokens: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the share of what token j has written that is left at token i, 0 if j > i:
    [B, K, M, i, j]; and whether the two are of two documents [B, 1, 1, i, j], None if none are.
    """
    total = chunk.total.transpose(2, 3)
    # Masked before exp, which for later tokens would overflow.
    is_later = torch.ones(total.shape[3], total.shape[3], dtype=torch.bool, device=total.device)
    between = (total - total.mT).masked_fill_(is_later.triu_(1), -torch.inf)
    apart = None
    if numbers is not None:
        here = numbers[:, None, None, tokens, None]
        apart = here != here.mT
        between.masked_fill_(apart, -torch.inf)
    return power_of_e(between.to(chunk.x.dtype)), apart


def _backward(
    chunk: _DualityChunk,
    between: torch.Tensor,
    apart: torch.Tensor | None,
    before: torch.Tensor,
    grad_out: torch.Tensor,
    grad_after: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the gradients of `written`, of dt a [B, K, C, M], of b and of c of a chunk, and that
    of the state before it.

    `grad_out` is [B, K, C, M, H]. `before`: the state before the chunk; `grad_after`: the gradient
    of the state after it; both are [B, N, H, S].
    """
    b, c, written = chunk.b, chunk.c, chunk.written
    over, sizes = chunk.over, chunk.x.shape[3:]
    by_group = before.unflatten(1, (b.shape[1], -1)), grad_after.unflatten(1, (b.shape[1], -1))
    over_sum = (by_group[0] * by_group[1]).sum((-2, -1)) * over[..., 0, 0]
    before, grad_after = (y.flatten(2, 3) for y in by_group)  # [B, K, M * H, S]

    # Through the state after the chunk and what is read of the state before it.
    grad_reads = grad_out * chunk.from_start
    reads = (c @ before.mT).unflatten(3, sizes)
    grad_ended = (b @ grad_after.mT).unflatten(3, sizes) * chunk.to_end
    flat_reads = grad_reads.flatten(3)
    grad_c = flat_reads @ before
    grad_b = (written * chunk.to_end).flatten(3) @ grad_after
    grad_before = (flat_reads.mT @ c).unflatten(2, sizes)
    grad_before.addcmul_(by_group[1], over)

    # Through the scores, by heads.
    heads_out = grad_out.transpose(2, 3)
    shared = c @ b.mT
    scores = between * shared[:, :, None]
    grad_written = (scores.mT @ heads_out).transpose(2, 3)
    grad_scores = heads_out @ written.permute(0, 1, 3, 4, 2)
    grad_shared = (grad_scores * between).sum(2)
    grad_c += grad_shared @ b
    grad_b += grad_shared.mT @ c

    # Sums of dt a: each decay e^{G_i - G_j} adds its gradient times itself to i and takes it from
    # j. In float64, so that what both ends of a later pair give to a decay cancels.
    grad_pairs = grad_scores.mul_(scores)
    grad_total = grad_pairs.sum(-1, dtype=torch.float64) - grad_pairs.sum(-2, dtype=torch.float64)
    grad_total = grad_total.transpose(2, 3)  # [B, K, C, M]
    at_end = (grad_ended * written).sum(-1).double()
    grad_total += (grad_reads * reads).sum(-1) - at_end
    grad_total[:, :, -1] += at_end.sum(2) + over_sum
    if apart is None:
        grad_decay = grad_total.flip(2).cumsum(2).flip(2)
    else:
        # Within each document, so that not even a rounding error reaches the one before.
        grad_decay = (~apart[:, 0]).double().triu_() @ grad_total
    grad_written = grad_written + grad_ended
    return (grad_written, grad_decay.to(b.dtype), grad_b, grad_c), grad_before.flatten(1, 2)


def _by_group(y: torch.Tensor, groups: int, tokens: slice) -> torch.Tensor:
    """Return some tokens of y [B, T, N, ...] as [B, K, C, M, ...], with M = N / K, wide."""
    return wide(y[:, tokens].unflatten(2, (groups, -1)).transpose(1, 2))


def _state_shape(x: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int, int]:
    """Return [B, N, H, S]."""
    return x.shape[0], x.shape[2], x.shape[3], b.shape[3]
