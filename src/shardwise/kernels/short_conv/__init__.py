"""The causal depthwise convolution over a few tokens that recurrent mixers have."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.gated_delta_rule.naive import begins
from shardwise.kernels.short_conv import shifted


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

    On a GPU with `causal_conv1d` installed its kernel computes it, except in float64 and for what
    it does not take: more than 4 taps, one tap, or channels that 8 does not divide.
    """
    assert activation in (None, "silu", "swish")
    kernel_takes_it = weight.shape[1] in (2, 3, 4) and weight.shape[0] % 8 == 0
    if kernel_takes_it and backend(x.device, x.dtype) == "causal_conv1d":
        return _by_causal_conv1d(x, weight, bias, activation, earlier, documents)
    return shifted.short_conv(x, weight, bias, activation, earlier, documents)


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return what computes the convolution on a device: `causal_conv1d` or `torch`."""
    has_kernel = device.type == "cuda" and dtype != torch.float64 and find_spec("causal_conv1d")
    return "causal_conv1d" if has_kernel else "torch"


def _by_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    earlier: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    kernel: Any = import_module("causal_conv1d").causal_conv1d_fn
    tokens, numbers = x.shape[1], None
    if documents is not None:
        # The kernel gives 0 for numbers below 0. Its earlier releases leave out the initial states
        # where documents are given, so these tokens become part of the row.
        numbers = begins(documents).cumsum(1, dtype=torch.int32)
        if earlier is not None:
            x, earlier = torch.cat([earlier.to(x.dtype), x], 1), None
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8:
        x = x.contiguous()
    out = kernel(
        x.transpose(1, 2),
        weight,
        None if bias is None else bias.to(weight.dtype),
        seq_idx=numbers,
        initial_states=None if earlier is None else earlier.to(x.dtype).transpose(1, 2),
        activation=activation,
    )
    return out.transpose(1, 2)[:, -tokens:]
