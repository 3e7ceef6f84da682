"""The backend of torch's own products; backend.Backend defines each function.

A product with a factor has a side of R columns or rows. In a backward, where R would be the columns
of the result, the transposed result is computed: on a CPU, libraries take up to nine times as long
for the other.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.quantised import Weight


def missing(device: torch.device) -> str | None:
    """Return None: it runs on every device."""
    return None


def project(
    x: torch.Tensor, a: Sequence[torch.Tensor], drop: Dropout | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R]."""
    x = x.to(dtype)
    if drop is None:
        return F.linear(x, _stacked(a).to(dtype))
    parts = [F.linear(drop.zero(x, i), a_i.to(dtype)) for i, a_i in enumerate(a)]
    return torch.cat(parts, 1) / (1.0 - drop.p)


def products(
    x: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    h: torch.Tensor,
    b: Sequence[torch.Tensor],
    scales: Sequence[float],
) -> list[torch.Tensor]:
    """Return y_i = x weight_i^T + bias_i + scale_i h_i b_i^T [rows, out] of each linear."""
    return [
        with_update(F.linear(x, weight.to(x.dtype), bias), h_i, b_i, scale)
        for weight, bias, h_i, b_i, scale in zip(weights, biases, h.chunk(len(b), 1), b, scales)
    ]


def with_update(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return y + scale h b^T [rows, out] in y's dtype.

    y may be changed, unless a mode sees operators: selective checkpointing, one of them, keeps y.
    """
    b = b.to(h.dtype)
    if y.dtype == h.dtype and not is_in_torch_dispatch_mode():
        return y.addmm_(h, b.t(), alpha=scale)
    return torch.addmm(y.to(h.dtype), h, b.t(), alpha=scale).to(y.dtype)


def output_gradients(
    dys: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    h: torch.Tensor | None,
    scales: Sequence[float],
    dtype: torch.dtype,
    needs_g: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g [rows, linears * R] of all linears and db [sum of outs, R], None if not needed."""
    hs = [None] * len(dys) if h is None else h.chunk(len(dys), 1)
    gs, dbs = [], []
    for dy, b_i, h_i, scale in zip(dys, b, hs, scales):
        dy = dy.to(dtype)
        if needs_g:
            gs.append((b_i.to(dtype).t() @ dy.t()).t().mul_(scale))
        if h_i is not None:
            dbs.append(_wide((h_i.t() @ dy).t()).mul_(scale))
    g = None if not gs else gs[0] if len(gs) == 1 else torch.cat(gs, 1)
    return g, None if not dbs else _stacked(dbs)


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    g: torch.Tensor,
    a: Sequence[torch.Tensor],
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    dx = dys[0] @ weights[0].to(dys[0].dtype)
    for dy, weight in zip(dys[1:], weights[1:]):
        dx.addmm_(dy, weight.to(dy.dtype))
    return with_input_gradient(dx, g, a, drop)


def with_input_gradient(
    dx: torch.Tensor, g: torch.Tensor, a: Sequence[torch.Tensor], drop: Dropout | None
) -> torch.Tensor:
    """Return dx + the sum over i of drop_i(g_i a_i) [rows, in] in dx's dtype; dx may be changed."""
    if drop is None:
        return dx.to(g.dtype).addmm_(g, _stacked(a).to(g.dtype)).to(dx.dtype)
    total = dx.to(g.dtype)
    factors = zip((g / (1.0 - drop.p)).chunk(len(a), 1), a)
    for i, (g_i, a_i) in enumerate(factors):
        total += drop.zero(g_i @ a_i.to(g.dtype), i)
    return total.to(dx.dtype)


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    x = x.to(g.dtype)
    if drop is None:
        return _wide(g.t() @ x)
    parts = [g_i.t() @ drop.zero(x, i) for i, g_i in enumerate(g.chunk(len(drop.seeds), 1))]
    return _wide(torch.cat(parts)) / (1.0 - drop.p)


def _stacked(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the factors of linears below one another, contiguous: [linears * R, in].

    A single column or row has its usual strides too, as DDP's buckets want it.
    """
    if len(factors) > 1:
        return torch.cat([*factors])
    return factors[0].flatten().view(factors[0].shape)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
