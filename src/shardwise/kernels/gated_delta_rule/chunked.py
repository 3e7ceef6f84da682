"""The gated delta rule a chunk of tokens at a time, as matrix products.

With G_i the sum of g up to token i of a chunk, and S the state before it, the corrections r_i = beta_i (v_i - what the
state holds under k_i) solve a unit lower triangular system: r_i + sum_{j<i} beta_i (k_i . k_j) e^{G_i - G_j} r_j =
beta_i v_i - beta_i e^{G_i} S^T k_i. Its right side is linear in S, so it is solved for all chunks at once, and only
products with S are left to go from chunk to chunk.
Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardwise.kernels.gated_delta_rule.naive import State, unit, wide

CHUNK = 64


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See gated_delta_rule of the package, which computes the same."""
    # Not in what autocast asks for: the state is float32 whatever the products around it are.
    with torch.autocast(q.device.type, enabled=False):
        dtype, tokens = v.dtype, v.shape[1]
        # [B, T, N, ...] -> [B, N, chunks, C, ...]. What fills up the last chunk has g = beta = 0: it changes nothing.
        q, k, v, g, beta = (_in_chunks(wide(x)) for x in (q, k, v, g, beta))
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        # In float64: the decay between two tokens is a difference of sums that may be as large as hundreds.
        decay = g.double().cumsum(-1)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
        # Masked before exp: of later tokens it would overflow, and its gradient be 0 times infinity.
        between = (decay[..., :, None] - decay[..., None, :]).to(v.dtype).masked_fill(later, -torch.inf).exp()
        rest = (decay[..., -1:] - decay).to(v.dtype).exp()[..., None]
        decay = decay.to(v.dtype).exp()[..., None]
        keys = k * beta[..., None]
        right = torch.cat([v * beta[..., None], keys * decay], -1)
        solved = torch.linalg.solve_triangular((keys @ k.mT) * between, right, upper=False, unitriangular=True)
        values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
        scores = (q @ k.mT) * between
        q, k, fade = q * decay, k * rest, decay[..., -1:, :]
        s = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(v.dtype)
        outs = []
        for c in range(v.shape[2]):
            corrections = values[:, :, c] - reads[:, :, c] @ s
            outs.append(q[:, :, c] @ s + scores[:, :, c] @ corrections)
            s = s * fade[:, :, c] + k[:, :, c].mT @ corrections
        return torch.cat(outs, 2)[:, :, :tokens].transpose(1, 2).to(dtype), s


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    x = x.transpose(1, 2)
    x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, -x.shape[2] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))
