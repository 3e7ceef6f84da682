"""The norm with a gate as autograd differentiates it, which keeps every step."""

import torch

from shardwise.kernels.recurrence import wide


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * activation(gate), in x's dtype.

    x and gate are [..., H], weight [H], the mean over the last dim; activation is silu or sigmoid.
    """
    y, z = wide(x), wide(gate)
    y = wide(weight) * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))
    factor = torch.sigmoid(z)
    if activation == "silu":
        factor = z * factor
    return (y * factor).to(x.dtype)
