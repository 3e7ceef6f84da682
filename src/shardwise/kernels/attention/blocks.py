"""Attention by fused operators, on no more keys and with no larger masks than needed.

Keys that all queries see need no mask, nor does a square block on the diagonal. Windows, documents
and capped scores do: their queries are computed some at a time, on some of the keys that lie in
their window. So no mask grows with the row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise.kernels.attention import capped, operators
from shardwise.kernels.attention.naive import Sight
from shardwise.kernels.attention.operators import Tensors

QUERIES, KEYS = 256, 8192
"""Queries and keys that are computed together where a mask is needed: it has so many elements.

As an operator's bias of 32 bits it takes 8 MiB.
"""


class Merged(NamedTuple):
    """The output of queries on all blocks of keys so far, and its log-sum-exp."""

    out: torch.Tensor
    """[B, N, T, H] in float32, or float64 of float64 inputs."""
    lse: torch.Tensor
    """[B, N, T]."""

    @classmethod
    def without_keys(cls, q: torch.Tensor, v: torch.Tensor) -> "Merged":
        """Return what queries have before they see a key.

        In memory tokens come before heads, as the projection after them wants: nothing is copied.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        rows, num_heads, length, _ = q.shape
        out = q.new_zeros(rows, length, num_heads, v.shape[-1], dtype=wide).transpose(1, 2)
        return cls(out, q.new_full(q.shape[:-1], -torch.inf, dtype=wide))

    def of(self, queries: slice) -> "Merged":
        """Return the part of some queries, in the same memory."""
        return Merged(self.out[:, :, queries], self.lse[:, :, queries])

    def add(self, out: torch.Tensor | None, lse: torch.Tensor) -> None:
        """Add the output on one more block of keys, in place; None: of keys without a value."""
        total = torch.logaddexp(self.lse, lse)
        anchor = finite(total)
        self.out.mul_(torch.exp(self.lse - anchor)[..., None])
        if out is not None:
            self.out.add_(out * torch.exp(lse - anchor)[..., None])
        self.lse.copy_(total)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, merged: Merged) -> None:
    """Add the output on these keys to that of the queries so far, without gradient.

    q, k, v: see the package.
    """
    for piece in _pieces(q.shape[2], k.shape[2], sight):
        mask = piece.mask(q.device)
        some_q, some_k, some_v = piece.of(q, k, v)
        if sight.cap is not None:
            assert mask is not None
            out, lse = capped.forward(some_q, some_k, some_v, mask, sight.scale, sight.cap)
        else:
            out, lse = operators.forward(some_q, some_k, some_v, mask, piece.is_causal, sight.scale)
        if mask is not None:
            sees_none = ~mask.any(-1)
            out = out.masked_fill(sees_none[..., None], 0.0)
            lse = lse.masked_fill(sees_none, -torch.inf)
        merged.of(piece.queries).add(out, lse)


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sight: Sight,
    gradients: Tensors,
) -> None:
    """Add what these keys give to the gradients of q, k and v (in float32 or float64), in place.

    `out` and `grad_out` (in q's dtype) and `lse` are those of attention on all keys, these among
    them.
    """
    lse = finite(lse)
    for piece in _pieces(q.shape[2], k.shape[2], sight):
        queries, keys, mask = piece.queries, piece.keys, piece.mask(q.device)
        inputs = (
            grad_out[:, :, queries],
            *piece.of(q, k, v),
            *(out[:, :, queries], lse[:, :, queries]),
        )
        if sight.cap is not None:
            assert mask is not None
            parts = capped.backward(*inputs, mask, sight.scale, sight.cap)
        else:
            parts = operators.backward(*inputs, mask, piece.is_causal, sight.scale)
        for gradient, where, part in zip(gradients, (queries, keys, keys), parts):
            gradient[:, :, where].add_(part)


def computed(
    queries: range, keys: range, window: int | None, cap: float | None = None
) -> list[tuple[int, int, bool]]:
    """Return how many of the queries and keys at these places of a row each operator takes, and
    whether with a mask.
    """
    sight = Sight(1.0, queries.start - keys.start, window, cap=cap)
    if sight.sees_none(len(queries), len(keys)):
        return []
    pieces = _pieces(len(queries), len(keys), sight)
    return [(len(queries[p.queries]), len(keys[p.keys]), p.sight is not None) for p in pieces]


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return lse, 0 for queries that see nothing: e^(-inf - 0) is 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


class _Piece(NamedTuple):
    """Queries and keys that one call of an operator takes."""

    queries: slice
    keys: slice
    is_causal: bool = False
    sight: Sight | None = None
    """Keys that these queries see; None: all of them, or what is causal."""

    def of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
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
    num_keys = min(num_keys, offset + num_queries)  # the last query sees no later ones
    if num_keys <= 0:
        return
    is_plain = sight.query_documents is None and sight.cap is None
    if is_plain and (window is None or offset + num_queries <= window):
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
        end = min(num_keys, queries.stop + offset)
        for key in range(first, end, KEYS):
            keys = slice(key, min(key + KEYS, end))
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
