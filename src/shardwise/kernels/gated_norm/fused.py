"""The norm with a gate, with a backward that computes the normed x and the activation again.

It keeps x, the gate and one number per row. Source of the norm: Zhang and Sennrich, "Root Mean
Square Layer Normalization", arXiv 1910.07467.
"""

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import wide
from shardwise.kernels.rms_norm.fused import grad_of_x, inverse_root

Activation = Literal["silu", "sigmoid"]


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: Activation
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * activation(gate), in x's dtype."""
    return _GatedNorm.apply(x, weight, gate, eps, activation)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        gate: torch.Tensor,
        eps: float,
        activation: Activation,
    ) -> torch.Tensor:
        root = inverse_root(x, eps)
        ctx.activation = activation
        ctx.save_for_backward(x, weight, gate, root)
        out = (x * root).mul_(weight).mul_(_activated(wide(gate), activation))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate, root = ctx.saved_tensors
        grad_out, z, dtype, x = wide(gradients[0]), wide(gate), x.dtype, wide(x)
        factor = _activated(z, ctx.activation)
        grad_x = grad_weight = grad_gate = None
        if ctx.needs_input_grad[2]:
            grad_factor = (x * root).mul_(grad_out).mul_(weight)
            if ctx.activation == "silu":
                grad_gate = torch.ops.aten.silu_backward(grad_factor, z)
            else:
                grad_gate = torch.ops.aten.sigmoid_backward(grad_factor, factor)
            del grad_factor
            grad_gate = grad_gate.to(gate.dtype)
        grad_product = factor.mul_(grad_out)  # the gradient of the normed x times the weight
        if ctx.needs_input_grad[1]:
            normed = (x * root).mul_(grad_product)
            grad_weight = normed.sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = grad_of_x(grad_product.mul_(weight), x, root).to(dtype)
        return grad_x, grad_weight, grad_gate, None, None


def _activated(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(z) if activation == "silu" else torch.sigmoid(z)
