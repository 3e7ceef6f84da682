"""The reference: the recurrence, token by token."""

import torch

from shardwise.kernels.gated_delta_rule.naive import begins, wide


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, H, S], as the package does."""
    dtype = x.dtype
    x, dt, a, b, c, d = (wide(y) for y in (x, dt, a, b, c, d))
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    starts = None if documents is None else begins(documents)
    batch, tokens, heads, head_size = x.shape
    s = x.new_zeros(batch, heads, head_size, b.shape[-1])
    if state is not None:
        s = state.to(x.dtype)
    outs = []
    for t in range(tokens):
        if starts is not None:
            s = s.masked_fill(starts[:, t, None, None, None], 0)
        step = dt[:, t, :, None, None]
        s = s * (step * a[:, None, None]).exp()
        s = s + step * x[:, t, :, :, None] * b[:, t, :, None, :]
        outs.append((s * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outs, 1).to(dtype), s
