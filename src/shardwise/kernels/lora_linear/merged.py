"""LoRA linears whose adapters were added to a copy of their weights: W' = W + s B A.

y = x W'^T + bias and dx = dy W' are one product each; only the gradients of A and B go through the rank, and h, which
the forward has not made, is made for them. It pays where many micro-batches share one W'. Rounding W' to its dtype is
an error that the unmerged product does not make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.lora_linear import torch_backend
from shardwise.kernels.lora_linear.backend import Backend
from shardwise.kernels.lora_linear.fused import Linear, computing_dtype, filled, stacked


def merge(linear: Linear, out: torch.Tensor) -> None:
    """Write W + s B A into `out` [N, K], rounded once to its dtype from float32 (float64 of float64)."""
    wide = torch.promote_types(linear.a.dtype, torch.float32)
    weight, a, b = (t.detach().to(wide) for t in (linear.weight, linear.a, linear.b))
    out.copy_(torch.addmm(weight, b, a, alpha=linear.scale))


def merged_lora_linear(
    x: torch.Tensor, linears: Sequence[Linear], merged: Sequence[torch.Tensor], backend: Backend = torch_backend
) -> tuple[torch.Tensor, ...]:
    """As `lora_linear` without dropout, where `merged` are what `merge` made of the linears."""
    device = x.device.type
    rows, dtype = computing_dtype(x, linears)
    a, b = ([getattr(linear, name) for linear in linears] for name in "ab")
    biases = [linear.bias for linear in linears]
    scales = tuple(linear.scale for linear in linears)
    with torch.autocast(device, enabled=False):
        ys = _MergedLinears.apply(backend, scales, dtype, rows, *merged, *biases, *a, *b)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


class _MergedLinears(torch.autograd.Function):
    """Of x, then S merged weights, S biases, S a and S b."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, scales: tuple[float, ...], dtype: torch.dtype, x: torch.Tensor, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        num = len(scales)
        ctx.set_materialize_grads(False)
        weights, biases, factors = tensors[:num], tensors[num : 2 * num], tensors[2 * num :]
        ctx.how = backend, scales, dtype
        ctx.save_for_backward(x, *weights, *factors)
        return tuple(F.linear(x, w.to(x.dtype), None if c is None else c.to(x.dtype)) for w, c in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (backend, scales, dtype), num = ctx.how, len(given)
        x, *tensors = ctx.saved_tensors
        weights, a, b = (tensors[i * num : (i + 1) * num] for i in range(3))
        dys, used = filled(given, weights)
        if not any(used):
            return (None,) * len(ctx.needs_input_grad)
        dx = None
        if ctx.needs_input_grad[3]:
            dx = dys[0] @ weights[0].to(x.dtype)
            for dy, weight in zip(dys[1:], weights[1:]):
                dx.addmm_(dy, weight.to(x.dtype))
        h = backend.project(x, stacked(a, dtype), None)
        found = [
            backend.output_gradients(dy, b_s.to(dtype), own_h, scale)
            for dy, b_s, own_h, scale in zip(dys, b, h.chunk(num, 1), scales)
        ]
        das = backend.factor_gradient(torch.cat([g for g, _ in found], 1), x, None).chunk(num)
        dbs = [db for _, db in found]
        factors = [d.to(f.dtype) if u else None for d, f, u in zip([*das, *dbs], [*a, *b], used * 2)]
        return None, None, None, dx, *[None] * (2 * num), *factors
