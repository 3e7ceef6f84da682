"""The products of experts with their rows, all experts in one of torch's grouped products.

`ends` [E] lies on the device, where the products read it: nothing waits for it.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from shardwise.kernels.grouped_linear.gradients import Gradients, Needs

ROW_BYTES = 16
"""Bytes of which a row of an operand of torch's grouped product must be a multiple."""


def takes(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Return whether one launch multiplies matrices of such widths, the rank of an adapter too.

    torch's kernel is for bfloat16 on GPUs; what else its function takes, it loops over itself.
    """
    is_fast = device.type == "cuda" and dtype == torch.bfloat16
    return is_fast and not any(width * dtype.itemsize % ROW_BYTES for width in widths)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return y [rows, out] as a new tensor."""
    y = F.grouped_mm(x, weight.mT, offs=ends)
    if a is not None and b is not None:
        h = F.grouped_mm(x, a.mT, offs=ends)  # [rows, R]
        y.add_(F.grouped_mm(h, b.contiguous().mT, offs=ends), alpha=scale)
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ends: torch.Tensor,
    needs: Needs,
) -> Gradients:
    """Return the gradients that are needed as new tensors. Those of experts without rows are 0."""
    dx = F.grouped_mm(dy, weight, offs=ends) if needs.x else None
    dweight = None
    if needs.weight:
        is_turned = weight.mT.is_contiguous()  # so is its gradient: nothing copies it
        dweight = F.grouped_mm(x.T, dy, offs=ends).mT if is_turned else None
        dweight = F.grouped_mm(dy.T, x, offs=ends) if dweight is None else dweight
    if a is None or b is None:
        return Gradients(dx, dweight, None, None)
    g = F.grouped_mm(dy, b.contiguous(), offs=ends).mul_(scale)  # [rows, R]
    if dx is not None:
        dx.add_(F.grouped_mm(g, a, offs=ends))
    if not needs.factors:
        return Gradients(dx, dweight, None, None)
    h = F.grouped_mm(x, a.mT, offs=ends)  # [rows, R]
    db = F.grouped_mm(dy.T, h, offs=ends).mul_(scale)
    return Gradients(dx, dweight, F.grouped_mm(g.T, x, offs=ends), db)
