"""The reference: one expert after the other, differentiated by autograd."""

import torch
from torch.nn import functional as F

from shardwise.kernels.grouped_linear.fused import StackedAdapter


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, adapter: StackedAdapter | None = None
) -> torch.Tensor:
    """Return y [rows, out] of x [rows, in], as fused.grouped_linear does."""
    outputs, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        rows = x[start:end].to(weight.dtype)
        y = F.linear(rows, weight[expert])
        if adapter is not None:
            a, b = adapter.a[expert].to(y.dtype), adapter.b[expert].to(y.dtype)
            y = y + F.linear(F.linear(rows, a), b) * adapter.scale
        outputs.append(y)
        start = end
    return torch.cat(outputs)
