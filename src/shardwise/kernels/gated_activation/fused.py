"""The gated activation with a backward that computes the activation again.

Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202, SwiGLU.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., F], in the dtype that both have."""
    assert gate.dtype == up.dtype
    return _GatedSilu.apply(gate, up)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        (grad_out,) = gradients
        grad_gate = grad_up = None
        if ctx.needs_input_grad[1]:
            grad_up = F.silu(gate).mul_(grad_out)
        if ctx.needs_input_grad[0]:
            grad_silu = grad_out * up
            grad_gate = torch.ops.aten.silu_backward.grad_input(
                grad_silu, gate, grad_input=grad_silu
            )
        return grad_gate, grad_up
