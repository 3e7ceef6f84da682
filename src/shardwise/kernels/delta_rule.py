"""The frame of a delta rule that goes chunk by chunk: forward, backward, and the map of all tokens.

A rule says what its chunks are and solves them (`Rule`); gated_delta_rule and kimi_delta_attention
differ in their decays alone. Only the state goes from chunk to chunk (chunks.py). The backward goes
from the last chunk to the first. It keeps the inputs and the state before each chunk, and computes
the rest again. Autocast is off: the state has 32 bits, whatever dtype the products around it have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels import chunks as chunk
from shardwise.kernels.chunks import Span, spans, tokens_first, tokens_of, zero_state
from shardwise.kernels.recurrence import Summary, wide

CHUNK = 64
"""C: tokens of a chunk."""
Tensors = tuple[torch.Tensor, ...]


class Rule(NamedTuple):
    """A delta rule by what it does with the chunks of a span."""

    marks: Callable[[torch.Tensor | None], torch.Tensor | None]
    """marks(documents): return what chunks read of documents [B, T]."""
    chunks: Callable[..., Any]
    """chunks(q, k, v, g, beta, marks, span): return the inputs in float32 or float64, n chunks
    before all other dims, with `q_from_start` and `k_to_end` [n, B, N, C, S], queries and keys
    times the share of a state that is left to them and after them, and `over`, that left after a
    chunk."""
    solve: Callable[..., tuple[torch.Tensor, torch.Tensor, Any]]
    """solve(chunks): return values and reads, of which the corrections are values - reads @ state,
    and what `similar` reads."""
    similar: Callable[..., torch.Tensor]
    """similar(chunks, solved): return what token i reads of the correction of token j <= i."""
    read: Callable[[torch.Tensor, Span], torch.Tensor]
    """read(x, span): return x [B, T, N, ...] as chunks [n, B, N, C, ...]."""
    backward: Callable[..., tuple[Tensors, torch.Tensor]]
    """backward(chunks, before, of_out, of_last): return the gradients of what the chunks have of
    the inputs, and of the state before them."""
    through_inputs: Callable[..., Tensors]
    """through_inputs(gradients, chunks, inputs, span): return those of the inputs themselves."""


def function_of(rule: Rule) -> type[torch.autograd.Function]:
    """Return the function of q, k, v, g, beta, state and documents, with its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor,
            state: torch.Tensor | None,
            documents: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            s = zero_state(k, v) if state is None else wide(state)
            marks, states, out = rule.marks(documents), [], torch.empty_like(v)
            with torch.autocast(v.device.type, enabled=False):
                for span in spans(v, CHUNK):
                    chunks = rule.chunks(q, k, v, g, beta, marks, span)
                    values, reads, solved = rule.solve(chunks)
                    before, corrections, s = chunk.pass_on(
                        values, reads, chunks.k_to_end, chunks.over, s
                    )
                    states.append(before)
                    similar = rule.similar(chunks, solved)
                    outs = chunks.q_from_start @ before + similar @ corrections
                    _write(out, outs, span)
                    del solved  # the next chunks do not need its memory
            ctx.state_dtype = s.dtype if state is None else state.dtype
            ctx.save_for_backward(q, k, v, g, beta, documents, *states)
            return out, s

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k, v, g, beta, documents, *states = ctx.saved_tensors
            inputs = q, k, v, g, beta
            of_out, of_last = gradients
            marks, of_state = rule.marks(documents), wide(of_last)
            of_inputs = [torch.empty_like(x) for x in inputs]
            with torch.autocast(of_out.device.type, enabled=False):
                for span in reversed(spans(of_out, CHUNK)):
                    chunks = rule.chunks(*inputs, marks, span)
                    of_chunks, of_state = rule.backward(
                        chunks, states.pop(), rule.read(of_out, span), of_state
                    )
                    of_slices = rule.through_inputs(of_chunks, chunks, inputs, span)
                    for of_x, of_slice in zip(of_inputs, of_slices, strict=True):
                        _write(of_x, of_slice, span)
            if not ctx.needs_input_grad[5]:
                return *of_inputs, None, None
            return *of_inputs, of_state.to(ctx.state_dtype), None

    return Function


def summary(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    documents: torch.Tensor | None,
) -> Summary:
    """Return the map of all tokens: matrices [B, N, S, S] and states [B, N, S, H]."""
    # The state and the matrix are columns of one state, of which only the former gets values.
    key_size, value_size = k.shape[-1], v.shape[-1]
    s = F.pad(zero_state(k, v), (0, key_size))
    s[..., value_size:] = torch.eye(key_size, dtype=s.dtype, device=s.device)
    marks = rule.marks(documents)
    with torch.autocast(v.device.type, enabled=False):
        for span in spans(v, CHUNK):
            chunks = rule.chunks(k, k, v, g, beta, marks, span)  # no query is read
            values, reads, _ = rule.solve(chunks)
            values = F.pad(values, (0, key_size))
            *_, s = chunk.pass_on(values, reads, chunks.k_to_end, chunks.over, s)
    after, transition = s.split([value_size, key_size], -1)
    return Summary(transition.contiguous(), after.contiguous())


def of_before(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    of_out: torch.Tensor,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [B, N, S, H] of the first state that the gradient of outputs gives."""
    marks, of_state = rule.marks(documents), zero_state(k, v)
    with torch.autocast(v.device.type, enabled=False):
        for span in reversed(spans(v, CHUNK)):
            chunks = rule.chunks(q, k, v, g, beta, marks, span)
            _, reads, solved = rule.solve(chunks)
            similar = rule.similar(chunks, solved)
            *_, of_state = pass_back(chunks, reads, similar, rule.read(of_out, span), of_state)
    return of_state


def pass_back(
    chunks: Any,
    reads: torch.Tensor,
    similar: torch.Tensor,
    of_out: torch.Tensor,
    of_state: torch.Tensor,
) -> Tensors:
    """Return the gradients of the states after the chunks, of corrections, and of the first state.

    `of_state` [B, N, S, H] is that of the state after the last one.
    """
    of_before, of_corrections = chunks.q_from_start.mT @ of_out, similar.mT @ of_out
    return chunk.pass_back(reads, chunks.k_to_end, chunks.over, of_before, of_corrections, of_state)


def _write(out: torch.Tensor, chunks: torch.Tensor, span: Span) -> None:
    """Write [n, B, N, C, ...] to the tokens of out [B, T, N, ...], without a chunk's padding."""
    tokens_of(out, span).copy_(tokens_first(chunks[:, :, :, : span.length]))
