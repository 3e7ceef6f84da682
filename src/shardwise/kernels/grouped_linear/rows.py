"""Rows in another order, and back, without a sum whose order depends on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


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
