"""The clamped gate of gpt-oss, with a backward that computes it again.

(u + 1) g sigmoid(alpha g) of a gate g, at most `limit`, and u, within +-`limit`. Gate and u of a
feature lie side by side.
Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925, section 2.2.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def clamped_gate(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return [..., F] of gates and products x [..., 2 F]."""
    return _ClampedGate.apply(x, alpha, limit)


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.numbers = alpha, limit
        gate, up = _clamped(x, limit)
        return up.mul_((gate * alpha).sigmoid_().mul_(gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,), (alpha, limit), (grad_out,) = ctx.saved_tensors, ctx.numbers, gradients
        gate, up = _clamped(x, limit)
        share = (gate * alpha).sigmoid_()
        grad = torch.empty_like(x)
        grad_up = (gate * share).mul_(grad_out).masked_fill_(x[..., 1::2].abs() > limit, 0)
        grad[..., 1::2].copy_(grad_up)
        # The derivative of g s, for s = sigmoid(alpha g), is s (1 + alpha g (1 - s)).
        slope = gate.mul_(alpha).mul_(1 - share).add_(1).mul_(share)
        grad_gate = slope.mul_(up).mul_(grad_out).masked_fill_(x[..., ::2] > limit, 0)
        grad[..., ::2].copy_(grad_gate)
        return grad, None, None


def _clamped(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gates, and what they multiply, in new memory."""
    return x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit).add_(1)
