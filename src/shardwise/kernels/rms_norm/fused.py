"""The root mean square norm with a written backward, which keeps x and one number per row.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.recurrence import wide


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), in x's dtype; the offset is 0 or 1."""
    assert offset in (0, 1), offset
    return _RMSNorm.apply(x, weight, eps, offset)


def inverse_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) [..., 1] in float32 or float64; no x^2 is written."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def grad_of_x(grad_scaled: torch.Tensor, x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x * root, which it overwrites; both are wide."""
    along = (grad_scaled * x).mean(-1, keepdim=True).mul_(root * root)
    return grad_scaled.addcmul_(x, along, value=-1).mul_(root)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        root = inverse_root(x, eps)
        ctx.offset = offset
        ctx.save_for_backward(x, weight, root)
        return _scaled(x * root, weight, offset).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, root = ctx.saved_tensors
        dtype, x, grad_out = x.dtype, wide(x), wide(gradients[0])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (x * root).mul_(grad_out).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = grad_of_x(_scaled(grad_out, weight, ctx.offset), x, root).to(dtype)
        return grad_x, grad_weight, None, None


def _scaled(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    return torch.addcmul(x, x, weight) if offset else x * weight
