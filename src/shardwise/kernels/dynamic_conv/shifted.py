"""The dynamic convolution as one elementwise product of all tokens per tap.

No tensor as large as the kernels is allocated, neither in the forward nor for the backward.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def dynamic_conv(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Return a causal depthwise convolution with a kernel per token: [B, T, D].

    x [B, P + T, D] are P earlier tokens and the T tokens of kernels [B, T, D, W], which have W
    taps. Token t gets the sum over w of kernels[:, t, :, w] * x[:, P + t - (W - 1) + w]: the last
    tap multiplies the token itself, and tokens before the first count as 0.
    Source: Jet-Nemotron, arXiv 2508.15884.
    """
    tokens, width = kernels.shape[1], kernels.shape[3]
    # W - 1 tokens before the first one; a negative padding cuts off what is never read.
    x = F.pad(x, (0, 0, tokens + width - 1 - x.shape[1], 0))
    taps = kernels.unbind(-1)
    out = x[:, width - 1 :] * taps[-1]
    for w in range(width - 1):
        out = out + x[:, w : w + tokens] * taps[w]
    return out
