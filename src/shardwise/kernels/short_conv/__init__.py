"""The causal depthwise convolution over a few tokens that recurrent mixers have."""

import torch

from shardwise.kernels import published
from shardwise.kernels.published import backend_of
from shardwise.kernels.short_conv import shifted

backend = backend_of("causal_conv1d", "fla")


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    earlier: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, T, D] of x [B, T, D] and weight [D, W], whose last tap is of the token itself.

    `earlier` [B, P, D] are the P = W - 1 tokens before x, zeros if None. `documents` [B, P + T] are
    those of `earlier`, where it is given, and of x: tokens of another document count as 0. `bias`
    is [D]; `activation` is silu (or swish, its other name) or None.

    The result has x's dtype. Sums are float32, or float64 if the weight is.

    On a GPU the kernels of `causal_conv1d` compute it or, where that is not installed, those of
    `fla`; float64, and what the first does not take (more than 4 taps, one tap, or channels that 8
    does not divide), are computed by torch.
    """
    assert activation in (None, "silu", "swish")
    by = backend(x.device, x.dtype)
    if by == "fla":
        return published.short_conv_of_fla(x, weight, bias, activation, earlier, documents)
    kernel_takes_it = weight.shape[1] in (2, 3, 4) and weight.shape[0] % 8 == 0
    if by == "causal_conv1d" and kernel_takes_it:
        return published.short_conv(x, weight, bias, activation, earlier, documents)
    return shifted.short_conv(x, weight, bias, activation, earlier, documents)
