"""The tokens of rows in chunks: what chunked recurrences have in common.

Only the state goes from chunk to chunk. All else is computed for as many chunks at once as the
device likes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwise.kernels.recurrence import wide

AT_ONCE = {"cpu": 1, "cuda": 1 << 30}
"""Chunks that are computed at once: one fits into a CPU's cache, a GPU wants large operators."""


class Span(NamedTuple):
    """Chunks that are computed at once: all have the same number of tokens, C."""

    start: int
    """The first token."""
    num_chunks: int
    length: int
    """C; the last chunk of a row may be shorter."""


def spans(v: torch.Tensor, length: int) -> list[Span]:
    """Return the chunks of `length` of the tokens of v [B, T, N, H], in order."""
    tokens, at_once = v.shape[1], AT_ONCE.get(v.device.type, 1)
    full, rest = divmod(tokens, length)
    full_spans = [
        Span(first * length, min(at_once, full - first), length)
        for first in range(0, full, at_once)
    ]
    return full_spans + [Span(full * length, 1, rest)] * (rest > 0)


def tokens_of(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span of x [B, T, ...], as [B, chunks, C, ...]: a view."""
    tokens = x[:, span.start : span.start + span.num_chunks * span.length]
    return tokens.unflatten(1, (span.num_chunks, span.length))


def heads_first(x: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tokens of a span of x [B, T, N, ...] as [chunks, B, N, C, ...], in 32 bits."""
    return wide(tokens_of(x, span).transpose(2, 3).transpose(0, 1)).contiguous()


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [chunks, B, N, C, ...] as [B, chunks, C, N, ...]."""
    return x.transpose(0, 1).transpose(2, 3)


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
