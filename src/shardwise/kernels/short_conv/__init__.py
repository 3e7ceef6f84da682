"""The causal depthwise convolution over a few tokens that recurrent mixers have."""

from __future__ import annotations

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
    """Return [B, T, D] of x [B, T, D] and weight [D, W], whose last tap is of the token itself.

    `earlier` [B, W - 1, D] are the tokens before x, zeros if None. `documents` [B, P + T] are those
    of `earlier`, where it is given, and of x: tokens of another document count as 0.
    """
    width, tokens = weight.shape[1], x.shape[1]
    before = width - 1
    if earlier is None:
        padded = F.pad(x, (0, 0, before, 0))
        if documents is not None:
            documents = F.pad(documents, (before, 0), value=-2)
    else:
        padded = torch.cat([earlier, x], 1)
    padded = padded.to(weight.dtype)
    out = padded[:, before:] * weight[:, -1]
    for tap in range(before):
        seen = padded[:, tap : tap + tokens]
        if documents is not None:
            apart = documents[:, tap : tap + tokens] != documents[:, before:]
            seen = seen.masked_fill(apart[..., None], 0)
        out = out + seen * weight[:, tap]
    if bias is not None:
        out = out + bias
    if activation is not None:
        assert activation in ("silu", "swish")
        out = F.silu(out)
    return out.to(x.dtype)


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return what computes the convolution of inputs of a dtype on a device."""
    return "torch"
