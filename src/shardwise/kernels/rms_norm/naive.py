"""The root mean square norm as autograd differentiates it, which keeps every step."""

import torch

from shardwise.kernels.recurrence import wide


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), in x's dtype."""
    y = wide(x)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + wide(weight))).to(x.dtype)
