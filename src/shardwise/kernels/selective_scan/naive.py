"""The reference: the recurrence, token by token."""

import torch
from torch.nn import functional as F

from shardwise.kernels.gated_delta_rule.naive import begins, wide


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, D] and the last state [B, D, S], as the package does."""
    dtype = x.dtype
    x, dt, a, b, c, d, z, bias = (wide(y) for y in (x, dt, a, b, c, d, z, bias))
    dt = F.softplus(dt + bias)
    starts = None if documents is None else begins(documents)
    s = x.new_zeros(x.shape[0], *a.shape)
    if state is not None:
        s = state.to(x.dtype)
    outs = []
    for t in range(x.shape[1]):
        if starts is not None:
            s = s.masked_fill(starts[:, t, None, None], 0)
        s = s * (dt[:, t, :, None] * a).exp()
        s = s + (dt * x)[:, t, :, None] * b[:, t, None, :]
        outs.append((s * c[:, t, None, :]).sum(-1) + d * x[:, t])
    return (torch.stack(outs, 1) * F.silu(z)).to(dtype), s
