"""Delta rules, a chunk of C tokens at a time, with their own backward, whatever their decays are.

The corrections that a chunk adds to the state solve a unit lower triangular system: they are
values - reads @ state, with the state before the chunk. The output is a sum of what the state and
what the corrections of the chunk give to each token, and the next state is linear in both.

The backward goes from the last chunk to the first. It keeps the inputs and the state before each
chunk, and computes the rest again. Only the state goes from chunk to chunk: all else is computed
for as many chunks at once as the device likes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import Summary, wide

CHUNK = 64
"""C: tokens of a chunk."""
AT_ONCE = {"cpu": 1, "cuda": 1 << 30}
"""Chunks that are computed at once: one fits into a CPU's cache, a GPU wants large operators."""


class Span(NamedTuple):
    """Chunks that are computed at once: all have the same number of tokens, C."""

    start: int
    """The first token."""
    num_chunks: int
    length: int
    """C; the last chunk of a row may be shorter."""


def spans(v: torch.Tensor) -> list[Span]:
    """Return the chunks of the tokens of v [B, T, N, H], in order."""
    tokens, at_once = v.shape[1], AT_ONCE.get(v.device.type, 1)
    full, rest = divmod(tokens, CHUNK)
    full_spans = [
        Span(first * CHUNK, min(at_once, full - first), CHUNK) for first in range(0, full, at_once)
    ]
    return full_spans + [Span(full * CHUNK, 1, rest)] * (rest > 0)


def tokens_of(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span of x [B, T, ...], as [B, chunks, C, ...]: a view."""
    tokens = x[:, span.start : span.start + span.num_chunks * span.length]
    return tokens.unflatten(1, (span.num_chunks, span.length))


def heads_first(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span of x [B, T, N, ...] as [chunks, B, N, C, ...], in 32 bits."""
    return wide(tokens_of(x, span).transpose(2, 3).transpose(0, 1)).contiguous()


def write(out: torch.Tensor, chunks: torch.Tensor, span: Span) -> None:
    """Write [chunks, B, N, C, ...] to a span of out [B, T, N, ...], without what pads a chunk."""
    if chunks.shape[3] > span.length:
        chunks = chunks[:, :, :, : span.length]
    tokens_of(out, span).copy_(chunks.transpose(0, 1).transpose(2, 3))


def zero_state(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a state of zeros [B, N, S, H] of keys [B, T, K, S] and values [B, T, N, H]."""
    batch, _, heads, value_size = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_zeros(batch, heads, k.shape[-1], value_size, dtype=dtype)


def pass_on(
    values: torch.Tensor,
    reads: torch.Tensor,
    k_to_end: torch.Tensor,
    over: torch.Tensor,
    s: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the states before the chunks [n, B, N, S, H], corrections, and the last state.

    A delta rule's corrections [n, B, N, C, H] are values - reads @ state. The state that a chunk
    leaves is `over` times the one before it, and what keys [n, B, N, C, S] add of corrections.
    """
    before, corrections = [], []
    for n in range(len(values)):
        before.append(s)
        corrections.append(_add_product(values[n], reads[n], s, -1))
        s = _add_product(s * over[n], k_to_end[n].mT, corrections[n])
    return _stacked(before), _stacked(corrections), s


def pass_back(
    reads: torch.Tensor,
    k_to_end: torch.Tensor,
    over: torch.Tensor,
    grad_before: torch.Tensor,
    grad_corrections: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the states after the chunks, of corrections, and of the first state.

    `grad_before` and `grad_corrections` are those that outputs give; `grad_state` [B, N, S, H] is
    that of the state after the last chunk.
    """
    grad_after, grad_each = [], list(grad_corrections.unbind())
    for n in reversed(range(len(reads))):
        grad_after.append(grad_state)
        grad_each[n] = _add_product(grad_each[n], k_to_end[n], grad_state)
        grad_state = torch.addcmul(grad_before[n], grad_state, over[n])
        grad_state = _add_product(grad_state, reads[n].mT, grad_each[n], -1)
    return _stacked(grad_after[::-1]), _stacked(grad_each), grad_state


def _add_product(
    x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: int = 1
) -> torch.Tensor:
    """Return x + alpha left @ right in one operator, of matrices [B, N, ...]."""
    product = torch.baddbmm(*(y.flatten(0, 1) for y in (x, left, right)), alpha=alpha)
    return product.unflatten(0, x.shape[:2])


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return [n, ...], without a copy where there is one chunk."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


class ChunkedRule(NamedTuple):
    """A delta rule by its own steps.

    `chunks` are an object of its own for n chunks, which has queries times the share of the state
    before a chunk that is left, `q_from_start`, and keys times the share of each that is left after
    its chunk, `k_to_end`, [n, B, N, C, S]; and the share of the state that is left after a chunk,
    `over`, [n, B, N, S or 1, 1].
    """

    marks: Callable[[torch.Tensor | None], torch.Tensor | None]
    """marks(documents): return what `prepare` needs of documents [B, T]."""
    prepare: Callable[..., Any]
    """prepare(q, k, v, g, beta, marks, span): return the chunks of a span."""
    pairs: Callable[[Any], Any]
    """pairs(chunks): return what the next two have in common, of each two tokens of a chunk."""
    solve: Callable[[Any, Any], tuple[torch.Tensor, ...]]
    """solve(chunks, pairs): return values [n, B, N, C, H] and reads [n, B, N, C, S]."""
    similar: Callable[[Any, Any], torch.Tensor]
    """similar(chunks, pairs): return q_i . k_j times what is left of j at i, 0 for j > i."""
    gradients: Callable[..., tuple[tuple[torch.Tensor, ...], torch.Tensor]]
    """gradients(inputs, chunks, span, before, grad_out, grad_state): return the gradients of the
    inputs, heads first, and of the state before a span. `before` [n, B, N, S, H] are the states
    before its chunks, `grad_out` is [n, B, N, C, H], and `grad_state` [B, N, S, H] the gradient of
    the state after the last one."""
    heads_first: Callable[[torch.Tensor, Span], torch.Tensor] = heads_first
    """heads_first(x, span): return x [B, T, N, ...] as the chunks have it."""

    def summary(self, *tensors: Any) -> Summary:
        """Return the map of all tokens; see `Recurrence.summary`."""
        _, k, v, *rest, documents = tensors
        # The state and the matrix are columns of one state, of which only the former gets values.
        key_size, value_size = k.shape[-1], v.shape[-1]
        s = F.pad(zero_state(k, v), (0, key_size))
        s[..., value_size:] = torch.eye(key_size, dtype=s.dtype, device=s.device)
        marks = self.marks(documents)
        with torch.autocast(v.device.type, enabled=False):
            for span in spans(v):
                chunks = self.prepare(k, k, v, *rest, marks, span)  # no query is read
                values, reads = self.solve(chunks, self.pairs(chunks))
                values = F.pad(values, (0, key_size))
                *_, s = pass_on(values, reads, chunks.k_to_end, chunks.over, s)
        after, transition = s.split([value_size, key_size], -1)
        return Summary(transition.contiguous(), after.contiguous())

    def grad_before(self, *tensors: Any) -> torch.Tensor:
        """Return the gradient of the first state; see `Recurrence.grad_before`."""
        *inputs, grad_out, documents = tensors
        _, k, v, *_ = inputs
        marks, grad_state = self.marks(documents), zero_state(k, v)
        with torch.autocast(v.device.type, enabled=False):
            for span in reversed(spans(v)):
                chunks = self.prepare(*inputs, marks, span)
                pairs = self.pairs(chunks)
                _, reads = self.solve(chunks, pairs)
                similar, grad_outs = self.similar(chunks, pairs), self.heads_first(grad_out, span)
                *_, grad_state = back_to_states(chunks, reads, similar, grad_outs, grad_state)
        return grad_state


def back_to_states(
    chunks: Any,
    reads: torch.Tensor,
    similar: torch.Tensor,
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the states after the chunks, of corrections, and of the first state.

    `grad_state` [B, N, S, H] is that of the state after the last one.
    """
    grad_before, grad_corrections = chunks.q_from_start.mT @ grad_out, similar.mT @ grad_out
    return pass_back(reads, chunks.k_to_end, chunks.over, grad_before, grad_corrections, grad_state)


class InChunks(torch.autograd.Function):
    """The outputs [B, T, N, H] and the last state [B, N, S, H] of a rule."""

    @staticmethod
    def forward(
        ctx: Any,
        rule: ChunkedRule,
        state: torch.Tensor | None,
        documents: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute from the first chunk to the last; `inputs` are q, k, v, g and beta."""
        _, k, v, *_ = inputs
        s = zero_state(k, v) if state is None else wide(state)
        marks, states, out = rule.marks(documents), [], torch.empty_like(v)
        # Autocast is off: the state has 32 bits, whatever dtype the products around it have.
        with torch.autocast(v.device.type, enabled=False):
            for span in spans(v):
                chunks = rule.prepare(*inputs, marks, span)
                pairs = rule.pairs(chunks)
                values, reads = rule.solve(chunks, pairs)
                before, corrections, s = pass_on(values, reads, chunks.k_to_end, chunks.over, s)
                states.append(before)
                similar = rule.similar(chunks, pairs)
                outs = chunks.q_from_start @ before + similar @ corrections
                write(out, outs, span)
        ctx.rule, ctx.state_dtype = rule, s.dtype if state is None else state.dtype
        ctx.save_for_backward(documents, *inputs, *states)
        return out, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute from the last chunk to the first."""
        documents, q, k, v, g, beta, *states = ctx.saved_tensors
        rule, inputs, (grad_out, grad_last) = ctx.rule, (q, k, v, g, beta), gradients
        marks, grad_state = rule.marks(documents), wide(grad_last)
        grad_inputs = [torch.empty_like(x) for x in inputs]
        with torch.autocast(v.device.type, enabled=False):
            for span in reversed(spans(v)):
                chunks = rule.prepare(*inputs, marks, span)
                before, grad_outs = states.pop(), rule.heads_first(grad_out, span)
                grads, grad_state = rule.gradients(
                    inputs, chunks, span, before, grad_outs, grad_state
                )
                for grad_x, grad_slice in zip(grad_inputs, grads):
                    write(grad_x, grad_slice, span)
        is_needed = ctx.needs_input_grad[1]
        grad_first = grad_state.to(ctx.state_dtype) if is_needed else None
        return None, grad_first, None, *grad_inputs
