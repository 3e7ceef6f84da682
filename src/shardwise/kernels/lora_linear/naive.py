"""The reference: one linear after the other, as PEFT computes them."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear.fused import Linear


def lora_linear(
    x: torch.Tensor, linears: Sequence[Linear], drop: Dropout | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the outputs [..., out] of x [..., in], one per linear, as fused.lora_linear does."""
    return tuple(_output(x, linear, drop, i) for i, linear in enumerate(linears))


def _output(x: torch.Tensor, linear: Linear, drop: Dropout | None, module: int) -> torch.Tensor:
    y = F.linear(x, linear.weight.to(linear.weight.dtype), linear.bias)
    rows = x.to(linear.a.dtype).flatten(0, -2)
    if drop is not None:
        rows = drop.drop(rows, module)
    update = F.linear(F.linear(rows, linear.a), linear.b) * linear.scale
    return (y + update.view(y.shape)).to(y.dtype)
