"""Products in 8 bits: what is rounded, by which scale, and that a device's products give the
same."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from shardwise.kernels import float8
from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.dropout import Dropout
from shardwise.kernels.float8 import Float8, Recipe, float8_linear
from shardwise.kernels.lora_linear import Linear, lora_linear

RECIPES = get_args(Recipe)
ROWS, IN, OUT, RANK = 24, 48, 80, 4


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def as_read(operand: torch.Tensor, dims: list[int], dtype: torch.dtype, powers: bool) -> Any:
    """An operand as it is after rounding: by hand, in float64."""
    most = torch.finfo(dtype).max
    scale = most / operand.double().abs().amax(dims, keepdim=True)
    if powers:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (operand.double() * scale).float().to(dtype).double() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_rounded_operands(recipe):
    x, w, dy = drawn(ROWS, IN), drawn(OUT, IN, seed=1), drawn(ROWS, OUT, seed=2)
    x.requires_grad_()
    w.requires_grad_()
    y = float8_linear(x, w, None, Float8(recipe))
    y.backward(dy)
    e4m3 = torch.float8_e4m3fn
    grad_dy = torch.float8_e5m2 if recipe == "tensorwise" else e4m3
    both = [0, 1]
    is_rowwise = recipe == "rowwise"

    def read(operand: torch.Tensor, summed: int, dtype: torch.dtype = e4m3) -> torch.Tensor:
        return as_read(operand.detach(), [summed] if is_rowwise else both, dtype, is_rowwise)

    expected = [
        read(x, 1) @ read(w, 1).t(),
        read(dy, 1, grad_dy) @ read(w, 0),
        read(dy, 0, grad_dy).t() @ read(x, 0),
    ]
    for value, exact in zip((y, x.grad, w.grad), expected):
        assert value is not None
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    # It is far from the product that is not rounded.
    assert (y - x @ w.t()).abs().max() > 0.01 * y.abs().max()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_devices_products_give_what_the_emulation_gives(recipe, dtype, monkeypatch):
    """torch has the product of 8 bits for CPUs too. Rows that are no multiple of 16 are filled."""
    results = []
    for products in (float8.multiply, of_device):
        monkeypatch.setattr(float8, "multiply", products)
        x = drawn(ROWS - 3, IN, dtype=dtype).requires_grad_()
        w = drawn(OUT - 8, IN, seed=1, dtype=dtype).requires_grad_()
        y = float8_linear(x, w, None, Float8(recipe))
        y.backward(drawn(*y.shape, seed=2, dtype=dtype))
        results.append((y.detach(), x.grad, w.grad))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # one rounding in bfloat16 is 8e-3
    for emulated, of_products in zip(*results):
        scale = emulated.abs().max()
        assert (emulated - of_products).abs().max() <= tolerance * scale


def of_device(a, a_scale, b, b_scale, dtype, is_forward=False):
    return float8.scaled_product(a, a_scale, b, b_scale, dtype, is_forward)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_linear_with_an_adapter_multiplies_the_frozen_weight_alone(recipe, p):
    x = drawn(ROWS, IN).requires_grad_()
    weights = [drawn(OUT, IN, seed=1), drawn(OUT, IN, seed=2)]
    factors = [(drawn(RANK, IN, seed=3 + i), drawn(OUT, RANK, seed=5 + i)) for i in range(2)]
    drop = None
    if p:
        seeds = torch.stack([torch.arange(ROWS) + 100 * i for i in range(2)]).int()
        drop = Dropout(p, seeds, None)
    products = Float8(recipe)
    for linears in ([products, products], [products, None]):
        grads = []
        plain = [None, None]
        for chosen in (linears, plain):
            x.grad = None
            with_adapters = [Linear(w, None, a, b, 0.5) for w, (a, b) in zip(weights, factors)]
            ys = lora_linear(x, with_adapters, drop, float8=chosen)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
            grads.append(([y.detach() for y in ys], x.grad))
        (ys, dx), (plain_ys, plain_dx) = grads
        expected_dx = plain_dx.clone()
        for y, plain_y, w, float8_i in zip(ys, plain_ys, weights, linears):
            dy = torch.ones_like(y)
            if float8_i is None:
                torch.testing.assert_close(y, plain_y)
                continue
            grad_weight = products.output(x.detach(), w)
            torch.testing.assert_close(y, plain_y - x.detach() @ w.t() + grad_weight)
            expected_dx += products.input_gradient(dy, w) - dy @ w
        torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_halves_of_a_backward_are_its_gradients(recipe):
    def gradients(half: BackwardHalf | None, halves: list[Any]) -> list[torch.Tensor]:
        x, w = drawn(ROWS, IN).requires_grad_(), drawn(OUT, IN, seed=1).requires_grad_()
        y = float8_linear(x, w, None, Float8(recipe, half))
        found = []
        for name, inputs in halves:
            if half is None:
                return list(torch.autograd.grad(y, (x, w), drawn(ROWS, OUT, seed=2)))
            wanted = x if inputs == "x" else w
            with half.running(name):
                dy = drawn(ROWS, OUT, seed=2)
                found += torch.autograd.grad(y, wanted, dy, retain_graph=True)
        return found

    full = gradients(None, [("full", "")])
    for halved, whole in zip(gradients(BackwardHalf(), [("input", "x"), ("weight", "w")]), full):
        assert torch.equal(halved, whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_large_numbers_stay_finite(recipe):
    zeros = float8_linear(torch.zeros(3, IN), drawn(OUT, IN), None, Float8(recipe))
    assert torch.equal(zeros, torch.zeros(3, OUT))
    large = torch.full((3, IN), 3e38, dtype=torch.bfloat16)
    y = Float8(recipe)._in_8_bits(large, ("rows", "in"), "in")[0].float()
    assert torch.equal(y, torch.full_like(y, y[0, 0].item()))
    assert 0 < y[0, 0] <= 448


def test_what_is_not_finite_is_not_hidden():
    x = drawn(ROWS, IN)
    x[3, 5] = torch.inf
    for recipe in RECIPES:
        assert not float8_linear(x, drawn(OUT, IN), None, Float8(recipe)).isfinite().all()


def test_autocast_gives_its_dtype_and_a_bias_is_added():
    x, w, bias = drawn(2, 3, IN), drawn(OUT, IN), drawn(OUT)
    with torch.autocast("cpu", torch.bfloat16):
        y = float8_linear(x, w, bias, Float8("tensorwise"))
    assert y.shape == (2, 3, OUT)
    assert y.dtype == torch.bfloat16
    plain = float8_linear(x.bfloat16(), w.bfloat16(), None, Float8("tensorwise"))
    assert torch.equal(y, plain + bias.bfloat16())


def test_a_gpu_without_such_products_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = float8.missing(torch.device("cuda"))
    assert reason is not None
    assert "8.0" in reason
    assert "8.9" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert float8.missing(torch.device("cuda")) is None
    assert float8.missing(torch.device("cpu")) is None
