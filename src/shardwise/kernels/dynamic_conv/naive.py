"""The reference: a loop over tokens and taps."""

from __future__ import annotations

import torch


def dynamic_conv(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Return [B, T, D] of x [B, P + T, D] and kernels [B, T, D, W], as shifted.dynamic_conv."""
    tokens, width = kernels.shape[1], kernels.shape[3]
    num_earlier = x.shape[1] - tokens
    outs = []
    for t in range(tokens):
        out = torch.zeros_like(x[:, 0])
        for w in range(width):
            place = num_earlier + t - (width - 1 - w)
            if place >= 0:
                out = out + x[:, place] * kernels[:, t, :, w]
        outs.append(out)
    return torch.stack(outs, 1)
