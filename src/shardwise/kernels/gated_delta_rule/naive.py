"""The reference: the recurrence, token by token."""

from __future__ import annotations

import torch

State = torch.Tensor | None


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dim at length 1, as the published kernels have it: |x|^2 + 1e-6 is under the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that states are kept in: float32, or float64 of float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See gated_delta_rule of the package, which computes the same."""
    dtype = v.dtype
    q, k, v, g, beta = (wide(x) for x in (q, k, v, g, beta))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    batch, tokens, heads, key_dim = k.shape
    s = v.new_zeros(batch, heads, key_dim, v.shape[-1]) if state is None else state.to(v.dtype)
    outs = []
    for t in range(tokens):
        s = s * g[:, t].exp()[..., None, None]
        stored = (s * k[:, t, :, :, None]).sum(-2)
        s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - stored))[..., None, :]
        outs.append((s * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, 1).to(dtype), s
