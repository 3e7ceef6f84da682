"""DoRA: the rows of W + s B A get trained lengths, in the place of those that they have.

y = (m / n) * ((W + s B A) x) + bias by output feature, where n is the length of each row of
W + s B A and m the trained one. n takes part in no gradient: it counts as a constant.
Source: Liu et al., "DoRA", arXiv 2402.09353, section 4.1, and 4.3 for the constant.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.quantised import Weight

CHUNK_ELEMENTS = 2**23
"""Elements of W + s B A that are made at once."""
Sum = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def row_norms(
    weight: Weight, a: torch.Tensor, b: torch.Tensor, scale: float, add_up: Sum | None = None
) -> torch.Tensor:
    """Return the lengths [out] of the rows of weight + scale b a, in float32 (or float64).

    weight [out, in], a [R, in], b [out, R]. `add_up` adds up the sums of squares [out] of those who
    hold other columns of the same rows. Some rows of the sum are in memory at a time.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    num_rows = max(1, CHUNK_ELEMENTS // weight.shape[1])
    with torch.autocast(a.device.type, enabled=False):
        values, a = weight.to(weight.dtype), a.to(dtype)
        squares = [
            torch.addmm(rows.to(dtype), b_rows.to(dtype), a, alpha=scale).square_().sum(1)
            for rows, b_rows in zip(values.split(num_rows), b.split(num_rows))
        ]
        total = torch.cat(squares)
        return (total if add_up is None else add_up(total)).sqrt()


def with_magnitude(
    y: torch.Tensor,
    magnitude: torch.Tensor,
    norms: torch.Tensor,
    bias: torch.Tensor | None,
    half: BackwardHalf | None = None,
) -> torch.Tensor:
    """Return magnitude / norms * y + bias in y's dtype, for y [..., out] and all others [out].

    `bias` is frozen. The backward keeps y. `half` is needed only where a pipeline runs backwards in
    two halves.
    """
    with torch.autocast(y.device.type, enabled=False):
        return _WithMagnitude.apply(y, magnitude, norms, bias, half)


class _WithMagnitude(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        magnitude: torch.Tensor,
        norms: torch.Tensor,
        bias: torch.Tensor | None,
        half: BackwardHalf | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, magnitude, norms)
        ctx.half = half
        scaled = _times(y, magnitude.to(norms.dtype) / norms)
        if bias is not None:
            scaled += bias
        return scaled.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, magnitude, norms = ctx.saved_tensors
        half = "full" if ctx.half is None else ctx.half.current
        needs_y, needs_magnitude, *_ = ctx.needs_input_grad
        d_y, d_magnitude = None, None
        if needs_y and half != "weight":
            d_y = _times(dy, magnitude.to(norms.dtype) / norms).to(y.dtype)
        if needs_magnitude and half != "input":
            products = _times(dy, y.to(norms.dtype)).flatten(0, -2)
            d_magnitude = (products.sum(0) / norms).to(magnitude.dtype)
        return d_y, d_magnitude, None, None, None


def _times(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x * factor in the dtype of the factor, as one new tensor."""
    return x.to(factor.dtype, copy=True).mul_(factor)
