"""The dynamic convolution as one elementwise product of all tokens per tap, with its own backward.

The backward keeps x and the kernels, and computes the sums before the activation again. No tensor
as large as the kernels is allocated, except their gradient.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.short_conv.shifted import by_tap


def dynamic_conv(
    x: torch.Tensor,
    kernels: torch.Tensor,
    activation: str | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a causal depthwise convolution with a kernel per token: [B, T, D].

    x [B, P + T, D] are P earlier tokens and the T tokens of kernels [B, T, D, W], which have W
    taps. Token t gets the sum over w of kernels[:, t, :, w] * x[:, P + t - (W - 1) + w]: the last
    tap multiplies the token itself. Tokens before the first count as 0, and so do those of another
    document by `documents` [B, P + T]. `activation` is silu or None. Sums are float32, or float64
    of float64. Source: Jet-Nemotron, arXiv 2508.15884.
    """
    assert activation in (None, "silu")
    return _DynamicConv.apply(x, kernels, activation is not None, documents)


class _DynamicConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        kernels: torch.Tensor,
        has_silu: bool,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.has_silu = has_silu
        ctx.save_for_backward(x, kernels, documents)
        z = _sums(x, kernels, documents)
        out = F.silu(z, inplace=True) if has_silu else z
        return out.to(torch.promote_types(x.dtype, kernels.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, kernels, documents = ctx.saved_tensors
        tokens, width = kernels.shape[1], kernels.shape[3]
        (grad_out,) = gradients
        grad_z = grad_out.to(_sum_dtype(x, kernels))
        if ctx.has_silu:
            grad_z = torch.ops.aten.silu_backward(grad_z, _sums(x, kernels, documents))
        seen, documents = _seen(x, kernels, documents)
        grad_seen = torch.zeros_like(seen, dtype=grad_z.dtype)
        grad_kernels = torch.empty_like(kernels)
        for w, shifted in enumerate(by_tap(seen, width, documents, 0, width - 1)):
            grad_kernels[..., w] = grad_z * shifted
            grad_shifted = grad_z * kernels[..., w]
            if documents is not None:
                apart = documents[:, w : w + tokens] != documents[:, width - 1 :]
                grad_shifted.masked_fill_(apart[..., None], 0)
            grad_seen[:, w : w + tokens] += grad_shifted
        grad_x = F.pad(grad_seen, (0, 0, x.shape[1] - seen.shape[1], 0))
        return grad_x.to(x.dtype), grad_kernels, None, None


def _seen(
    x: torch.Tensor, kernels: torch.Tensor, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and documents with W - 1 tokens before the first of the kernels.

    A negative padding cuts off what is never read.
    """
    missing = kernels.shape[1] + kernels.shape[3] - 1 - x.shape[1]
    if documents is not None:
        documents = F.pad(documents, (missing, 0))
    return F.pad(x, (0, 0, missing, 0)), documents


def _sums(x: torch.Tensor, kernels: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Return the sums [B, T, D] of the tokens of each tap times its weights."""
    width = kernels.shape[3]
    seen, documents = _seen(x, kernels, documents)
    total = torch.zeros(kernels.shape[:3], dtype=_sum_dtype(x, kernels), device=x.device)
    for shifted, tap in zip(by_tap(seen, width, documents, 0, width - 1), kernels.unbind(-1)):
        total += shifted.to(total.dtype) * tap
    return total


def _sum_dtype(x: torch.Tensor, kernels: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, kernels.dtype), torch.float32)
