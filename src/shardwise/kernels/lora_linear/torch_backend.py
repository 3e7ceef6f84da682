"""The backend that needs nothing but torch's own products; see backend.Backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional as F

from shardwise.kernels.dropout import Dropout


def missing(device: torch.device) -> str | None:
    """See Backend."""
    return None


def refused(dtypes: Iterable[torch.dtype]) -> str | None:
    """See Backend."""
    return None


def project(x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    x = x.to(a.dtype)
    if drop is None:
        return F.linear(x, a)
    parts = a.chunk(len(drop.seeds))
    return torch.cat([F.linear(drop.zero(x, s), part) for s, part in enumerate(parts)], 1) / (1.0 - drop.p)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """See Backend."""
    y = F.linear(x, weight, bias)
    return torch.addmm(y.to(h.dtype), h, b.t(), alpha=scale).to(y.dtype)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See Backend."""
    g = None if b is None else (dy.to(b.dtype) @ b) * scale
    db = None if h is None else _wide(dy.to(h.dtype).t() @ h) * scale
    return g, db


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """See Backend."""
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        dx = torch.addmm(dx, dy, weight)
    if drop is None:
        return torch.addmm(dx.to(g.dtype), g, a).to(dx.dtype)
    total = dx.to(g.dtype)
    parts = zip((g / (1.0 - drop.p)).chunk(len(drop.seeds), 1), a.chunk(len(drop.seeds)))
    for s, (own_g, own_a) in enumerate(parts):
        total += drop.zero(own_g @ own_a, s)
    return total.to(dx.dtype)


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    x = x.to(g.dtype)
    if drop is None:
        return _wide(g.t() @ x)
    parts = g.chunk(len(drop.seeds), 1)
    return _wide(torch.cat([part.t() @ drop.zero(x, s) for s, part in enumerate(parts)])) / (1.0 - drop.p)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
