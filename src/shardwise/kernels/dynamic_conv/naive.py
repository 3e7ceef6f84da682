"""The reference: a loop over tokens and taps."""

import torch
from torch.nn import functional as F


def dynamic_conv(
    x: torch.Tensor,
    kernels: torch.Tensor,
    activation: str | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, T, D] of x [B, P + T, D] and kernels [B, T, D, W], as shifted.dynamic_conv."""
    tokens, width = kernels.shape[1], kernels.shape[3]
    num_earlier = x.shape[1] - tokens
    outs = []
    for t in range(tokens):
        out = torch.zeros_like(x[:, 0])
        for w in range(width):
            place = num_earlier + t - (width - 1 - w)
            if place < 0:
                continue
            token = x[:, place]
            if documents is not None:
                apart = documents[:, place] != documents[:, num_earlier + t]
                token = token.masked_fill(apart[:, None], 0)
            out = out + token * kernels[:, t, :, w]
        outs.append(out)
    stacked = torch.stack(outs, 1)
    return stacked if activation is None else F.silu(stacked)
