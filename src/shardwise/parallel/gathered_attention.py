"""Attention of a rank's queries on the keys and values of all ranks along `cp`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import Tokens
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.parallel.reduce import all_gather, reduce_scatter


def attention(
    tokens: Tokens,
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **flags: Any,
) -> tuple[torch.Tensor, None]:
    """Return [B, T, N, V] of q [B, N, T, H], k [B, K, T, H] and v [B, K, T, V] of this rank.

    A token meets those before it of its document and, with a sliding window, of the last so many.
    """
    assert mask is None
    assert dropout == 0.0, "a rule refuses dropout inside attention"
    documents, first = tokens.documents, 0
    of_queries = documents
    if isinstance(tokens.neighbours, ContextNeighbours):
        ranks = tokens.neighbours
        first = ranks.rank * q.shape[2]
        k, v = _Gathered.apply(k, ranks), _Gathered.apply(v, ranks)
        documents = None if documents is None else ranks.document_ids
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    query = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    meets = key <= query
    if sliding_window is not None:
        meets &= key > query - sliding_window
    if documents is not None and of_queries is not None:
        meets = meets & (of_queries[:, None, :, None] == documents[:, None, None])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=meets, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class _Gathered(torch.autograd.Function):
    """Keys or values [B, K, T n, H] of all ranks, of [B, K, T, H]; gradients are added up.

    (n-1) times the bytes of a rank's reach each rank, and as many leave it in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ContextNeighbours) -> torch.Tensor:
        ctx.ranks = ranks
        gathered = x.new_empty(ranks.size, *x.shape)
        all_gather(gathered.view(-1), x.contiguous().view(-1), group=ranks.group)
        return gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        shares = gradient.unflatten(2, (ctx.ranks.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        summed = torch.empty_like(shares[0])
        reduce_scatter(summed.view(-1), shares.view(-1), group=ctx.ranks.group)
        return summed, None
