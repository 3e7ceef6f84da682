"""The reference: the recurrence, token by token."""

import torch

from shardwise.kernels.gated_delta_rule.naive import State, unit
from shardwise.kernels.recurrence import begins, wide


def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, S, H], as the package does."""
    dtype = v.dtype
    q, k, v, g, beta = (wide(x) for x in (q, k, v, g, beta))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    starts = None if documents is None else begins(documents)
    batch, tokens, heads, key_size = k.shape
    s = v.new_zeros(batch, heads, key_size, v.shape[-1])
    if state is not None:
        s = state.to(v.dtype)
    outs = []
    for t in range(tokens):
        if starts is not None:
            s = s.masked_fill(starts[:, t, None, None, None], 0)
        s = s * g[:, t, :, :, None].exp()
        stored = (s * k[:, t, :, :, None]).sum(-2)
        s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - stored))[..., None, :]
        outs.append((s * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, 1).to(dtype), s
