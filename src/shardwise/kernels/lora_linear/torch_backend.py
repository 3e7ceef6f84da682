"""The backend of torch's own products; backend.Backend defines each function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.quantised import Weight


def missing(device: torch.device) -> str | None:
    """Return None: it runs on every device."""
    return None


def project(
    x: torch.Tensor, a: torch.Tensor, drop: Dropout | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R]."""
    x, a = x.to(dtype), a.to(dtype)
    if drop is None:
        return F.linear(x, a)
    parts = [F.linear(drop.zero(x, i), a_i) for i, a_i in enumerate(a.chunk(len(drop.seeds)))]
    return torch.cat(parts, 1) / (1.0 - drop.p)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return y = x weight^T + bias + scale h b^T [rows, out]."""
    return with_update(F.linear(x, weight, bias), h, b, scale)


def with_update(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return y + scale h b^T [rows, out] in y's dtype."""
    return torch.addmm(y.to(h.dtype), h, b.to(h.dtype).t(), alpha=scale).to(y.dtype)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R], each None if not needed."""
    b = None if b is None else b.to((b if h is None else h).dtype)
    g = None if b is None else (dy.to(b.dtype) @ b) * scale
    db = None if h is None else _wide(dy.to(h.dtype).t() @ h) * scale
    return g, db


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    dx = dys[0] @ weights[0].to(dys[0].dtype)
    for dy, weight in zip(dys[1:], weights[1:]):
        dx.addmm_(dy, weight.to(dy.dtype))
    return with_input_gradient(dx, g, a, drop)


def with_input_gradient(
    dx: torch.Tensor, g: torch.Tensor, a: torch.Tensor, drop: Dropout | None
) -> torch.Tensor:
    """Return dx + the sum over i of drop_i(g_i a_i) [rows, in] in dx's dtype; dx may be changed."""
    a = a.to(g.dtype)
    if drop is None:
        return dx.to(g.dtype).addmm_(g, a).to(dx.dtype)
    total = dx.to(g.dtype)
    num_linears = len(drop.seeds)
    factors = zip((g / (1.0 - drop.p)).chunk(num_linears, 1), a.chunk(num_linears))
    for i, (g_i, a_i) in enumerate(factors):
        total += drop.zero(g_i @ a_i, i)
    return total.to(dx.dtype)


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    x = x.to(g.dtype)
    if drop is None:
        return _wide(g.t() @ x)
    parts = [g_i.t() @ drop.zero(x, i) for i, g_i in enumerate(g.chunk(len(drop.seeds), 1))]
    return _wide(torch.cat(parts)) / (1.0 - drop.p)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
