"""Apertus' xIELU: the published function, whose derivative does not jump, as transformers' does."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers.activations import XIELUActivation

from shardwise.models.patches.xielu import use_smooth_activations

RATE_ABOVE, RATE_BELOW, BETA = 0.7, 0.9, 0.5
TINY = [-1e-5, -9e-7, -5e-7, -1e-8, 1e-8, 5e-7]


@pytest.fixture(scope="module")
def activations() -> tuple[nn.Module, nn.Module]:
    """transformers' activation, in 64 bits, and a copy of it with ours."""
    theirs = XIELUActivation(RATE_ABOVE, RATE_BELOW, BETA, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    use_smooth_activations(ours)
    return theirs, ours


def value_and_gradients(activation: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The values at x, their derivatives, and the gradients of both rates."""
    x = x.clone().requires_grad_()
    value = activation(x)
    weights = torch.linspace(-1, 2, x.numel(), dtype=x.dtype)
    rates = torch.autograd.grad(
        (value * weights).sum(), [*activation.parameters()], retain_graph=True
    )
    return [value.detach(), *torch.autograd.grad(value.sum(), x), *rates]


def by_hand(x: float) -> tuple[float, float]:
    """The value and the derivative near 0, from the first terms of the series of e^x."""
    if x > 0:
        return RATE_ABOVE * x * x + BETA * x, 2 * RATE_ABOVE * x + BETA
    return RATE_BELOW * (x**2 / 2 + x**3 / 6) + BETA * x, RATE_BELOW * math.expm1(x) + BETA


def test_equals_transformers_away_from_0(activations):
    x = torch.cat([torch.linspace(-200, -1e-3, 999), torch.linspace(1e-3, 200, 999)]).double()
    theirs, ours = (value_and_gradients(activation, x) for activation in activations)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-15)


def test_equals_the_published_function_near_0(activations):
    value, slope, *_ = value_and_gradients(activations[1], torch.tensor(TINY).double())
    for i, x in enumerate(torch.tensor(TINY).double().tolist()):
        assert (value[i].item(), slope[i].item()) == pytest.approx(by_hand(x), rel=1e-9)


def test_transformers_has_another_derivative_just_below_0(activations):
    # Once transformers has mended this, models/patches/xielu.py can go.
    x = -5e-7
    value, slope, *_ = value_and_gradients(activations[0], torch.tensor([x]).double())
    assert slope.item() == pytest.approx(BETA - RATE_BELOW)
    assert by_hand(x)[1] == pytest.approx(BETA, rel=1e-5)
    assert value.item() - by_hand(x)[0] == pytest.approx(RATE_BELOW * (-1e-6 - x), rel=1e-5)


def test_zero_has_the_slope_of_both_sides(activations):
    value, slope, *_ = value_and_gradients(activations[1], torch.zeros(1).double())
    assert (value.item(), slope.item()) == (0.0, BETA)
