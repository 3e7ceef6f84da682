"""The dynamic convolution against its loop, and against torch's where all kernels are equal."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels.dynamic_conv import naive, shifted


def inputs(tokens: int, before: int, width: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(tokens + 7 * before)
    x = torch.randn(2, before + tokens, 5, generator=generator, dtype=dtype)
    kernels = torch.randn(2, tokens, 5, width, generator=generator, dtype=dtype)
    return x.requires_grad_(), kernels.requires_grad_()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("before", [0, 1, 3, 6])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_equals_the_loop(tokens, before, width):
    x, kernels = inputs(tokens, before, width)
    out, expected = shifted.dynamic_conv(x, kernels), naive.dynamic_conv(x, kernels)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads, expected_grads = (
        torch.autograd.grad((o * weight).sum(), (x, kernels)) for o in (out, expected)
    )
    for grad, other in zip(grads, expected_grads):
        assert other.abs().max() > 0
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def test_one_kernel_for_all_tokens_is_a_causal_convolution():
    x, kernels = inputs(9, 0, 4)
    same = kernels[:1, :1].expand(2, 9, -1, -1)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), kernels[0, 0][:, None], groups=5).mT
    torch.testing.assert_close(shifted.dynamic_conv(x, same), expected)


def test_gradients_by_differences():
    assert torch.autograd.gradcheck(shifted.dynamic_conv, inputs(3, 2, 4))
