"""The reference: the recurrence, token by token."""

import torch

from shardwise.kernels.recurrence import begins, wide

State = torch.Tensor | None
"""[B, N, S, H], or None for zeros."""


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x with the vectors of its last dim divided by their length, sqrt(|x|^2 + 1e-6).

    The published kernels add the same 1e-6.
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, S, H], as the package does.

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0;
    `state` is that of the first token's document.
    """
    dtype = v.dtype
    q, k, v, g, beta = (wide(x) for x in (q, k, v, g, beta))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    starts = None if documents is None else begins(documents)
    batch, tokens, heads, key_size = k.shape
    s = v.new_zeros(batch, heads, key_size, v.shape[-1])
    if state is not None:
        s = state.to(v.dtype)
    outs = []
    for t in range(tokens):
        if starts is not None:
            s = s.masked_fill(starts[:, t, None, None, None], 0)
        s = s * g[:, t].exp()[..., None, None]
        stored = (s * k[:, t, :, :, None]).sum(-2)
        s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - stored))[..., None, :]
        outs.append((s * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, 1).to(dtype), s
