"""The norm with a gate equals autograd's, and keeps x, the gate and a number per row."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shardwise.kernels.gated_norm import fused, gated_norm, naive
from shardwise.kernels.recurrence import wide
from tests.kernels.gates import error, kept_elements, run
from tests.models.tiny import relative_error

EPS = {torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}
ACTIVATIONS = ["silu", "sigmoid"]


def inputs(
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> list[torch.Tensor]:
    """x, weight and gate."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4, 6), (6,), (2, 3, 4, 6))
    dtypes = (dtype, weight_dtype or dtype, dtype)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        .mul(2)
        .to(kind)
        .requires_grad_(is_needed)
        for shape, kind, is_needed in zip(shapes, dtypes, needed)
    ]


def kernels(activation: str) -> list[partial[torch.Tensor]]:
    """Ours and the naive one."""
    others = {"eps": 1e-2, "activation": activation}
    return [partial(kernel, **others) for kernel in (gated_norm, naive.gated_norm)]


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_naive_one(dtype, weight_dtype, activation):
    tolerance = EPS[dtype] if weight_dtype is None else max(EPS[dtype], 1e-6)
    assert error(*kernels(activation), inputs(dtype, weight_dtype)) < tolerance


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_small_differences(activation):
    assert torch.autograd.gradcheck(kernels(activation)[0], inputs())


@pytest.mark.parametrize("place", range(3))
def test_only_needed_gradients_are_computed(place):
    needed = (place == 0, place == 1, place == 2)
    assert error(*kernels("silu"), inputs(needed=needed)) < 1e-12


def test_rows_of_zeros_and_strong_gates_give_finite_gradients():
    x, weight, gate = inputs(torch.float32)
    with torch.no_grad():
        x[0], gate[1] = 0, -1e30
    for activation in ACTIVATIONS:
        tensors = [x, weight, gate]
        results = run(partial(gated_norm, eps=1e-6, activation=activation), tensors)
        assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_keeps_the_inputs_and_a_number_per_row(activation):
    x, weight, gate = inputs(torch.float32)
    kept = x.numel() + weight.numel() + gate.numel() + x.numel() // x.shape[-1]
    assert kept_elements(kernels(activation)[0], [x, weight, gate]) == kept


def _sigmoid_for_silu(z: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.sigmoid(z)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return wide(x.bfloat16())


@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [
        (fused, "_activated", _sigmoid_for_silu),
        (fused, "wide", _rounded),
        (torch.ops.aten, "silu_backward", torch.mul),
    ],
)
def test_a_planted_mistake_shows(place, name, mistake, monkeypatch):
    ours, other = kernels("silu")
    tensors = inputs()
    expected = run(other, tensors)
    monkeypatch.setattr(place, name, mistake)
    pairs = zip(run(ours, tensors), expected, strict=True)
    assert max(relative_error(mine, theirs) for mine, theirs in pairs) > 1e-4
