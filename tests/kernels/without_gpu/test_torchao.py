"""Products in 8 bits are those of torchao's linears, for both recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import get_args

import pytest
import torch

from shardwise.kernels.float8 import Float8, Recipe, float8_linear

with contextlib.redirect_stderr(io.StringIO()):  # of its compiled parts, which are not used
    torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")


@pytest.mark.parametrize("recipe", get_args(Recipe))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_torchaos(recipe, dtype):
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, dtype=dtype)
    holder = torch.nn.Sequential(linear)
    torchao.convert_to_float8_training(holder, config=dataclasses.replace(config, emulate=True))
    theirs = holder[0]
    assert type(theirs) is not torch.nn.Linear
    x, dy = torch.randn(3, 16, 48, dtype=dtype), torch.randn(3, 16, 80, dtype=dtype)
    results = []
    for forward in (lambda x: float8_linear(x, linear.weight, linear.bias, Float8(recipe)), theirs):
        x = x.detach().requires_grad_()
        y = forward(x)
        results.append((y, *torch.autograd.grad(y, (x, linear.weight), dy)))
    # They divide by the scales before a product and round to the operands' dtype there.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    for ours, other in zip(*results):
        assert (ours - other).abs().max() <= tolerance * other.abs().max()
