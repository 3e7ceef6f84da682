"""The gated delta rule, a chunk of C tokens at a time, as matrix products.

Let G_i be the sum of g up to token i of a chunk, and s the state before the chunk. The corrections
r_i = beta_i (v_i - what the state stores under k_i) solve a unit lower triangular system:

    r_i + sum_{j<i} beta_i (k_i . k_j) e^{G_i - G_j} r_j = beta_i v_i - beta_i e^{G_i} s^T k_i

The right side is linear in s. So the system is solved for all chunks at once, and only products
with s remain to be computed chunk after chunk.
Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardwise.kernels.gated_delta_rule.naive import State, unit, wide

CHUNK = 64
"""C: tokens of a chunk."""


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, N, H] and the last state [B, N, S, H], as the package does."""
    # Autocast is off: the state is float32, whatever dtype the products around it have.
    with torch.autocast(q.device.type, enabled=False):
        dtype, tokens = v.dtype, v.shape[1]
        # [B, T, N, ...] -> [B, N, chunks, C, ...]. The padding of the last chunk has g = beta = 0,
        # so that it leaves the state as it is.
        q, k, v, g, beta = (_in_chunks(wide(x)) for x in (q, k, v, g, beta))
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        decay, decay_between, decay_to_end = _decays(g, v.dtype)
        keys = k * beta[..., None]
        right_side = torch.cat([v * beta[..., None], keys * decay], -1)
        solved = torch.linalg.solve_triangular(
            (keys @ k.mT) * decay_between, right_side, upper=False, unitriangular=True
        )
        values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
        scores = (q @ k.mT) * decay_between
        q, k, chunk_decay = q * decay, k * decay_to_end, decay[..., -1:, :]
        s = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        if state is not None:
            s = state.to(v.dtype)
        outs = []
        for c in range(v.shape[2]):
            corrections = values[:, :, c] - reads[:, :, c] @ s
            outs.append(q[:, :, c] @ s + scores[:, :, c] @ corrections)
            s = s * chunk_decay[:, :, c] + k[:, :, c].mT @ corrections
        return torch.cat(outs, 2)[:, :, :tokens].transpose(1, 2).to(dtype), s


def _decays(g: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return how much of a state is left, of g [B, N, chunks, C], in `dtype`.

    From before the chunk to each token [..., C, 1], from token j to token i [..., i, j] (0 if j is
    later), and from each token to the end of the chunk [..., C, 1].
    """
    # In float64: the decay between two tokens is a difference of sums that may reach hundreds.
    total = g.double().cumsum(-1)
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).to(dtype)
    # Masked before exp: for later tokens exp would overflow, and its gradient be 0 * infinity.
    between = between.masked_fill(is_later, -torch.inf).exp()
    to_end = (total[..., -1:] - total).to(dtype).exp()[..., None]
    return total.to(dtype).exp()[..., None], between, to_end


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, N, ...] as [B, N, chunks, C, ...], padded with zeros."""
    x = x.transpose(1, 2)
    x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, -x.shape[2] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))
