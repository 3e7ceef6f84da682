"""One product of all tokens per tap: nothing as large as the kernels is made, in the forward or for the backward."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def dynamic_conv(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Each channel's last W values, weighted by the kernel of its token: [B, T, D].

    x [B, P + T, D]: the T tokens that kernels [B, T, D, W] belong to, after P earlier ones, of which the last W - 1
    are seen; what is missing before them is 0. The last tap is the token's own.
    """
    tokens, width = kernels.shape[1], kernels.shape[3]
    x = F.pad(x, (0, 0, tokens + width - 1 - x.shape[1], 0))  # negative: cuts off
    taps = kernels.unbind(-1)
    out = x[:, width - 1 :] * taps[-1]
    for w in range(width - 1):
        out = out + x[:, w : w + tokens] * taps[w]
    return out
