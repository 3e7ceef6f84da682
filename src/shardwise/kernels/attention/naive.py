"""The reference: all scores at once, in float32 or float64."""

from typing import NamedTuple

import torch


class Sight(NamedTuple):
    """Which keys a query sees: those up to its own place, in a window, of its document."""

    scale: float
    """Factor of the scores q . k."""
    offset: int = 0
    """The place of the first query minus that of the first key: query i sees key j if
    j <= i + offset."""
    window: int | None = None
    """Number of keys that a query sees, the last ones up to its own place."""
    query_documents: torch.Tensor | None = None
    """[B, T] int64: a query sees the keys whose document is its own; None: all are of one."""
    key_documents: torch.Tensor | None = None
    """[B, T'] int64, with `query_documents`."""
    cap: float | None = None
    """The cap c of scores: c tanh(s / c) of a score s; None: they are not capped."""

    def sees_none(self, num_queries: int, num_keys: int) -> bool:
        """Return whether no query sees any key, whatever their documents are."""
        is_before = self.offset + num_queries <= 0
        nearest = self.offset - num_keys + 1
        return is_before or (self.window is not None and nearest >= self.window)

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """Return whether a query sees a key: [T, T'], or [B, 1, T, T'] with documents."""
        queries = torch.arange(num_queries, device=device)[:, None] + self.offset
        keys = torch.arange(num_keys, device=device)
        mask = keys <= queries
        if self.window is not None:
            mask &= keys > queries - self.window
        if self.query_documents is None:
            return mask
        assert self.key_documents is not None
        same = self.query_documents[:, None, :, None] == self.key_documents[:, None, None, :]
        return same & mask


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, N, T, H] in q's dtype, and its log-sum-exp; autograd gives gradients.

    q, k, v and what is returned: see the package.
    """
    scores = _scores(q, k, sight)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - _finite(lse)[..., None]) @ _alike(v, q)
    return out.to(q.dtype), lse


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what these keys give to the gradients of q, k and v.

    `out`, `lse` and the gradient `grad_out` are those of attention on all keys, these among them.
    """
    wide_k, wide_v, grad_out = _alike(k, q), _alike(v, q), _wide(grad_out)
    scores = _scores(q, k, sight)
    shares = torch.exp(scores - _finite(lse)[..., None])
    grad_scores = grad_out @ wide_v.mT - (grad_out * out).sum(-1, keepdim=True)
    grad_scores = grad_scores * shares * sight.scale
    if sight.cap is not None:
        grad_scores = grad_scores * (1 - (_finite(scores) / sight.cap) ** 2)
    heads = k.shape[1], -1
    grad_k = (grad_scores.mT @ _wide(q)).unflatten(1, heads).sum(2)
    grad_v = (shares.mT @ grad_out).unflatten(1, heads).sum(2)
    return (grad_scores @ wide_k).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, sight: Sight) -> torch.Tensor:
    scores = (_wide(q) @ _alike(k, q).mT) * sight.scale
    if sight.cap is not None:
        scores = sight.cap * torch.tanh(scores / sight.cap)
    return scores.masked_fill(~sight.mask(q.shape[2], k.shape[2], q.device), -torch.inf)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return lse, 0 for queries that see nothing: e^(-inf - 0) is 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _alike(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return keys or values with as many heads as queries, in the dtype of sums."""
    return _wide(x).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
