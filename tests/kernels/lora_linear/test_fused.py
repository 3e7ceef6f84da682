"""A LoRA linear in one node, against one product after the other."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import Linear, lora_linear, naive


def draw(m, k, sizes, rank, dtype=torch.float64, factors=None, bias=True, p=0.0):
    """x, linears and dropout."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    linears = [
        Linear(
            randn(n, k) / k**0.5,
            randn(n) if bias else None,
            (randn(rank, k, dtype=factors or dtype) / k**0.5).requires_grad_(),
            (randn(n, rank, dtype=factors or dtype) / rank**0.5).requires_grad_(),
            0.5 + i,
        )
        for i, n in enumerate(sizes)
    ]
    seeds = torch.randint(-(2**31), 2**31, (len(sizes), m), generator=g, dtype=torch.int32)
    return randn(m, k).requires_grad_(), linears, Dropout(p, seeds) if p else None


def run(forward, x, linears, drop):
    """Outputs and gradients."""
    ys = forward(x, linears, drop)
    inputs = [x, *(linear.a for linear in linears), *(linear.b for linear in linears)]
    # Another gradient for each output, of about 1.
    dys = [
        torch.cos(torch.arange(y.numel(), device=y.device) * (i + 1.0)).view(y.shape).to(y) for i, y in enumerate(ys)
    ]
    return [*ys, *torch.autograd.grad(ys, inputs, dys)]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("m", "k", "sizes", "rank"), [(7, 5, (3,), 1), (33, 17, (9, 4, 5), 2), (0, 5, (3, 4), 2), (40, 64, (31, 31), 256)]
)
def test_equals_the_reference(m, k, sizes, rank, p):
    problem = draw(m, k, sizes, rank, p=p)
    for found, expected in zip(run(lora_linear, *problem), run(naive.lora_linear, *problem), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
