"""The norm with a gate, with a backward that computes the normed x and the activation again.

It keeps x, the gate and one number per row. Source of the norm: Zhang and Sennrich, "Root Mean
Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.recurrence import wide

Activation = Literal["silu", "sigmoid"]


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * activation(gate), in x's dtype.

    x and gate are [..., H] and weight [H]; the mean is over the last dim. It computes in float32
    (float64 of float64) and rounds once, as the kernel of `fla` does. transformers' torch code
    rounds the normed x of some families too.
    """
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
        y = wide(x)
        root = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        ctx.activation = activation
        ctx.save_for_backward(x, weight, gate, root)
        out = (y * root).mul_(weight).mul_(_activated(wide(gate), activation))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate, root = ctx.saved_tensors
        grad_out, z = wide(gradients[0]), wide(gate)
        normed = wide(x) * root
        factor = _activated(z, ctx.activation)
        grad_x = grad_weight = grad_gate = None
        if ctx.needs_input_grad[2]:
            grad_factor = (grad_out * normed).mul_(weight)
            if ctx.activation == "silu":
                grad_gate = torch.ops.aten.silu_backward(grad_factor, z)
            else:
                grad_gate = torch.ops.aten.sigmoid_backward(grad_factor, factor)
            grad_gate = grad_gate.to(gate.dtype)
        grad_product = grad_out * factor  # the gradient of the normed x times the weight
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_product * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_normed = grad_product.mul_(weight)
            along = (grad_normed * normed).mean(-1, keepdim=True)
            grad_x = grad_normed.sub_(normed.mul_(along)).mul_(root).to(x.dtype)
        return grad_x, grad_weight, grad_gate, None, None


def _activated(z: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(z) if activation == "silu" else torch.sigmoid(z)
