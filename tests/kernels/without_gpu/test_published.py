"""Norms, gates and convolutions by fla and liger_kernel, interpreted, equal torch's in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import liger_kernel.ops.rms_norm
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from shardwise.kernels import published
from shardwise.kernels.gated_activation import naive as gated_activation
from shardwise.kernels.gated_norm import naive as gated_norm
from shardwise.kernels.rms_norm import naive as rms_norm
from shardwise.kernels.short_conv import naive as short_conv

SIZE = 33
"""Features of a norm: no kernel's block divides them."""
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2, [0] * 2 + [1] * 9])


class Number(float):
    """A number as a kernel gets it on a GPU: Triton's interpreter hands Python's own over."""

    def to(self, dtype: object) -> Number:
        """Return it in any dtype."""
        return self


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla says that there is no GPU
    import fla.modules  # noqa: F401


@pytest.fixture(autouse=True)
def what_an_interpreter_lacks(monkeypatch):
    """No driver that times a choice, and no library of the device."""
    first = property(lambda tuner: lambda call, quantiles: (0.0, 0.0, 0.0))
    monkeypatch.setattr(Autotuner, "do_bench", first)
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", rsqrt)


def draw(*shape: int, seed: int = 0, is_trained: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(is_trained)


def worst(
    kernel: Callable[..., torch.Tensor],
    naive: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
) -> float:
    """The largest relative error of the output or a gradient."""
    double = [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors
    ]
    results = []
    for function, inputs in ((kernel, tensors), (naive, double)):
        out = function(*inputs)
        needed = [x for x in inputs if x is not None and x.requires_grad]
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), needed)])
    pairs = zip(*results, strict=True)
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("is_trained", [True, False])
def test_norm_of_liger(offset, is_trained):
    kernel = partial(published.rms_norm, eps=Number(1e-2), offset=Number(offset))
    naive = partial(rms_norm.rms_norm, eps=1e-2, offset=offset)
    x, weight = draw(2, 5, SIZE), draw(SIZE, seed=1, is_trained=is_trained)
    assert worst(kernel, naive, [x, weight]) < 2e-6


def test_norm_of_liger_leaves_the_gradient_that_it_is_given():
    """Others may read it: that of a residual sum goes to both of its terms."""
    x, weight = draw(4, SIZE), draw(SIZE, seed=1)
    out = published.rms_norm(x, weight, Number(1e-2), Number(0.0))
    given = torch.ones_like(out)
    out.backward(given)
    assert given.eq(1).all()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_norm_with_a_gate_of_fla(activation):
    options = {"eps": 1e-2, "activation": activation}
    tensors = [draw(2, 5, 3, SIZE), draw(SIZE, seed=1), draw(2, 5, 3, SIZE, seed=2)]
    kernels = (partial(by.gated_norm, **options) for by in (published, gated_norm))
    assert worst(*kernels, tensors) < 2e-6


def test_gated_activation_of_fla():
    tensors = [draw(2, 5, SIZE), draw(2, 5, SIZE, seed=1)]
    assert worst(published.gated_silu, gated_activation.gated_silu, tensors) < 2e-6


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_convolution_of_fla(activation, has_earlier, apart):
    documents = DOCUMENTS if apart else None
    if apart and has_earlier:
        documents = torch.cat([DOCUMENTS[:, :1].expand(2, 3), DOCUMENTS], 1)
    earlier = draw(2, 3, 16, seed=3) if has_earlier else None
    bias = draw(16, seed=2) if activation else None
    tensors = [draw(2, 11, 16), draw(16, 4, seed=1), bias, earlier]

    def kernel(by: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, weight, bias, earlier: by(x, weight, bias, activation, earlier, documents)

    assert worst(kernel(published.short_conv_of_fla), kernel(short_conv.short_conv), tensors) < 2e-6
