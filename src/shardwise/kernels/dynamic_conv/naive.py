"""The reference: a loop over tokens and taps."""

from __future__ import annotations

import torch


def dynamic_conv(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """See shifted.dynamic_conv, which computes the same."""
    tokens, width = kernels.shape[1], kernels.shape[3]
    before = x.shape[1] - tokens
    outs = []
    for t in range(tokens):
        out = torch.zeros_like(x[:, 0])
        for w in range(width):
            at = before + t - (width - 1 - w)
            if at >= 0:
                out = out + x[:, at] * kernels[:, t, :, w]
        outs.append(out)
    return torch.stack(outs, 1)
