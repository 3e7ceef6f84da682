"""The reference: a loop over tokens and taps."""

import torch
from torch.nn import functional as F


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    earlier: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, T, D] of x [B, T, D] and weight [D, W], as the package does."""
    width = weight.shape[1]
    before = 0 if earlier is None else width - 1
    seen = x if earlier is None else torch.cat([earlier, x], 1)
    outs = []
    for t in range(before, seen.shape[1]):
        out = torch.zeros_like(x[:, 0]) if bias is None else bias.expand_as(x[:, 0])
        for tap in range(width):
            place = t - (width - 1 - tap)
            if place < 0:
                continue
            token = seen[:, place]
            if documents is not None:
                apart = documents[:, place] != documents[:, t]
                token = token.masked_fill(apart[:, None], 0)
            out = out + token * weight[:, tap]
        outs.append(out)
    stacked = torch.stack(outs, 1)
    return stacked if activation is None else F.silu(stacked)
