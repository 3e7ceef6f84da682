"""Rows in another order, and back, without a sum whose order depends on the device."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def take_rows(
    x: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int = 1
) -> torch.Tensor:
    """Return rows x[order // copies] [S, D] of x [S / copies, D]; `back` [S] undoes `order` [S].

    The gradient is gathered, not scattered: a row's is the sum over its copies, in their order.
    """
    return _Rows.apply(x, order, back, copies)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        dx = dy.index_select(0, back)
        if ctx.copies > 1:
            dx = dx.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return dx, None, None, None


def rows_of_experts(x: torch.Tensor, ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the row of its expert for each of `num_rows` sorted rows; x is [E, D].

    The rows of expert e end before row ends[e]. Its gradient is the sum over them, in their order.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).to(x.device, torch.int64)
    return _RowsOfExperts.apply(x, counts, num_rows)


class _RowsOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return x.repeat_interleave(counts, 0, output_size=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        sums = aten.segment_reduce(dy.contiguous(), "sum", lengths=counts, axis=0, unsafe=True)
        return sums, None, None
