"""Attention by fused operators, on no more keys and with no larger masks than needed.

Keys that all queries see need no mask, nor does a square block on the diagonal. Windows and
documents do: their queries are computed some at a time, on the keys that lie in their window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise.kernels.attention import operators
from shardwise.kernels.attention.naive import Sight

QUERIES = 512
"""Queries that are computed together where a mask is needed: it takes so many times T elements."""


class Merged:
    """The output of queries on all blocks of keys so far, and its log-sum-exp."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        """Begin with no key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)

    def add(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the output of some of the queries on one more block of keys."""
        merged_out, merged_lse = self.out[:, :, queries], self.lse[:, :, queries]
        total = torch.logaddexp(merged_lse, lse)
        anchor = finite(total)
        merged_out.mul_(torch.exp(merged_lse - anchor)[..., None])
        merged_out.add_(out * torch.exp(lse - anchor)[..., None])
        merged_lse.copy_(total)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, N, T, H], in float32 or float64, and its log-sum-exp, without gradient.

    q, k, v and what is returned: see the package.
    """
    merged = Merged(q, v)
    for piece in _pieces(q.shape[2], k.shape[2], sight):
        mask = piece.mask(q.device)
        some_q, some_k, some_v = piece.of(q, k, v)
        out, lse = operators.forward(some_q, some_k, some_v, mask, piece.is_causal, sight.scale)
        if mask is not None:
            sees_none = ~mask.any(-1)
            out = out.masked_fill(sees_none[..., None], 0.0)
            lse = lse.masked_fill(sees_none, -torch.inf)
        merged.add(piece.queries, out, lse)
    return merged.out, merged.lse


def attend_backward(
    of_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what these keys give to the gradients of q, k and v, in float32 or float64.

    `out` and `of_out` (in q's dtype) and `lse` are those of attention on all keys, these among
    them.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    lse = finite(lse)
    for piece in _pieces(q.shape[2], k.shape[2], sight):
        queries, keys = piece.queries, piece.keys
        gradients = operators.backward(
            of_out[:, :, queries],
            *piece.of(q, k, v),
            out[:, :, queries],
            lse[:, :, queries],
            piece.mask(q.device),
            piece.is_causal,
            sight.scale,
        )
        of_q[:, :, queries] += gradients[0]
        of_k[:, :, keys] += gradients[1]
        of_v[:, :, keys] += gradients[2]
    return of_q, of_k, of_v


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return lse, 0 for queries that see nothing: e^(-inf - 0) is 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


class _Piece(NamedTuple):
    """Queries and keys that one call of an operator takes."""

    queries: slice
    keys: slice
    is_causal: bool = False
    sight: Sight | None = None
    """Of these queries on these keys; None: all see all, or what is causal."""

    def of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the queries, keys and values."""
        return q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Return the mask of what needs one."""
        if self.sight is None:
            return None
        num_queries = self.queries.stop - self.queries.start
        return self.sight.mask(num_queries, self.keys.stop - self.keys.start, device)


def _pieces(num_queries: int, num_keys: int, sight: Sight) -> Iterator[_Piece]:
    """Yield the pieces of all queries and keys; what no query sees is in none of them."""
    window, offset = sight.window, sight.offset
    if sight.query_documents is None and (window is None or offset + num_queries <= window):
        everything = slice(0, num_queries)
        if offset >= num_keys - 1:
            yield _Piece(everything, slice(0, num_keys))
            return
        if offset >= 0 and offset + num_queries == num_keys:
            if offset:
                yield _Piece(everything, slice(0, offset))
            yield _Piece(everything, slice(offset, num_keys), is_causal=True)
            return
    for start in range(0, num_queries, QUERIES):
        queries = slice(start, min(start + QUERIES, num_queries))
        first = 0 if window is None else max(0, start + offset - window + 1)
        keys = slice(first, min(num_keys, queries.stop + offset))
        if keys.start < keys.stop:
            yield _Piece(queries, keys, sight=_part(sight, queries, keys))


def _part(sight: Sight, queries: slice, keys: slice) -> Sight:
    """Return what some of the queries see of some of the keys."""
    part = sight._replace(offset=sight.offset + queries.start - keys.start)
    if sight.query_documents is None or sight.key_documents is None:
        return part
    return part._replace(
        query_documents=sight.query_documents[:, queries],
        key_documents=sight.key_documents[:, keys],
    )
