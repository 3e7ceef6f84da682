"""The linears of experts with their adapters, in one autograd node that keeps only its inputs.

y_i = x_i W_e^T + scale (x_i A_e^T) B_e^T for row i of expert e. The stack of weights [E, out, in]
is read where it lies: neither the product B A nor a copy of the stack is made. The backward
computes x A^T, which has few columns, again.
Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1, for each expert by itself.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.grouped_linear import grouped, loop
from shardwise.kernels.grouped_linear.gradients import Needs
from shardwise.kernels.quantised import StoredLayout, Weight, layouts_of, tensors_of, weights_of


class StackedAdapter(NamedTuple):
    """The factors of all experts' adapters."""

    a: torch.Tensor  # [E, R, in]
    b: torch.Tensor  # [E, out, R]
    scale: float


def grouped_linear(
    x: torch.Tensor,
    weight: Weight,
    ends: torch.Tensor,
    adapter: StackedAdapter | None = None,
    half: BackwardHalf | None = None,
) -> torch.Tensor:
    """Return y [rows, out] of x [rows, in], whose rows are sorted by expert.

    The rows of expert e end before row ends[e] [E], int32; an expert may have none, and the last
    one's end with x. Where `ends` lies chooses the path: on a GPU, grouped products; on the CPU, a
    loop over experts. weight is [E, out, in], in any strides. Products are in its dtype, under
    autocast too: a cast would copy the stack. `half` is needed only where a pipeline runs backwards
    in two halves. There are no second derivatives.
    """
    a, b, scale = adapter or (None, None, 1.0)
    with torch.autocast(x.device.type, enabled=False):
        if adapter is not None:
            a, b = (_rounded(factor, weight.dtype) for factor in (adapter.a, adapter.b))
        (layout,) = layouts_of([weight])
        x = x.to(weight.dtype)
        return _GroupedLinear.apply(x, a, b, layout, scale, ends, half, *tensors_of([weight]))


def _rounded(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor in a dtype. PEFT's B of an expert lies apart: a cast brings it together."""
    if factor.dtype == dtype:
        return factor
    return factor.to(dtype, memory_format=torch.contiguous_format)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layout: StoredLayout | None,
        scale: float,
        ends: torch.Tensor,
        half: BackwardHalf | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b, ends, *tensors)
        ctx.layout, ctx.scale, ctx.half = layout, scale, half
        (weight,) = weights_of(tensors, [layout])
        return output(x, weight.to(weight.dtype), a, b, scale, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, ends, *tensors = ctx.saved_tensors
        (weight,) = weights_of(tensors, [ctx.layout])
        half = "full" if ctx.half is None else ctx.half.current
        needs_x, needs_a, needs_b, *_, needs_weight = ctx.needs_input_grad
        needs = Needs(
            needs_x and half != "weight",
            needs_weight and half != "input",
            (needs_a or needs_b) and half != "input",
        )
        values = weight.to(weight.dtype)
        grads = gradients(dy.contiguous(), x, values, a, b, ctx.scale, ends, list(needs))
        are_needed = (*needs, needs.factors)
        dx, dw, da, db = (grad if needed else None for grad, needed in zip(grads, are_needed))
        return dx, da, db, None, None, None, None, *[None] * (len(tensors) - 1), dw


@torch.library.custom_op("shardwise::grouped_linear", mutates_args=())
def output(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return y as a new tensor. torch.compile looks into no loop over the tokens' experts."""
    path = grouped if ends.is_cuda else loop
    return path.forward(x, weight, a, b, scale, ends)


@output.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("shardwise::grouped_linear_gradients", mutates_args=())
def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Return the gradients as new tensors, empty where one is not needed.

    That of the weight lies as the weight does, the others are contiguous.
    """
    path = grouped if ends.is_cuda else loop
    dx, dw, da, db = path.backward(dy, x, weight, a, b, scale, ends, Needs(*needs))
    return [dy.new_empty(0) if grad is None else grad for grad in (dx, dw, da, db)]


@gradients.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
    needs: list[bool],
) -> list[torch.Tensor]:
    empty = [
        tensor.new_empty(tensor.shape) if tensor is not None and needed else dy.new_empty(0)
        for tensor, needed in zip((x, weight, a, b), (needs[0], needs[1], needs[2], needs[2]))
    ]
    if needs[1]:
        empty[1] = torch.empty_like(weight)
    return empty
