"""The gated activation equals torch's operators one after the other, and keeps its inputs alone."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.gated_activation import fused, gated_silu, naive
from tests.kernels.gates import error, kept_elements, run
from tests.models.tiny import relative_error

EPS = {torch.float64: 1e-13, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def inputs(dtype: torch.dtype = torch.float64, *needed: bool) -> list[torch.Tensor]:
    """gate and up, views of one projection as in Granite's MLP; both need a gradient by default."""
    generator = torch.Generator().manual_seed(0)
    projected = 4 * torch.randn(2, 5, 14, generator=generator, dtype=torch.float64)
    pair = zip(projected.to(dtype).chunk(2, dim=-1), needed or (True, True))
    return [tensor.requires_grad_(is_needed) for tensor, is_needed in pair]


@pytest.mark.parametrize("dtype", EPS)
def test_equals_the_naive_one(dtype):
    assert error(gated_silu, naive.gated_silu, inputs(dtype)) < EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_of_16_bits_is_torchs(dtype):
    tensors = inputs(dtype)
    assert torch.equal(gated_silu(*tensors), naive.gated_silu(*tensors))


def test_gradients_are_those_of_small_differences():
    assert torch.autograd.gradcheck(gated_silu, inputs())


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(needed):
    assert error(gated_silu, naive.gated_silu, inputs(torch.float64, *needed)) < 1e-13


def test_gates_of_any_size_give_finite_gradients():
    gate = torch.tensor([-torch.inf, -1e30, -100.0, 100.0, 1e30]).requires_grad_()
    up = torch.ones(5, requires_grad=True)
    assert all(result[1:].isfinite().all() for result in run(gated_silu, [gate, up]))


def test_the_backward_keeps_the_inputs():
    gate, up = (torch.randn(3, 7, requires_grad=True) for _ in range(2))
    assert kept_elements(gated_silu, [gate, up]) == gate.numel() + up.numel()
    assert kept_elements(naive.gated_silu, [gate, up]) == 3 * gate.numel()


def _without_the_slope(
    grad_out: torch.Tensor, gate: torch.Tensor, *, grad_input: torch.Tensor
) -> torch.Tensor:
    return grad_out * torch.sigmoid(gate)


def _of_the_gate_alone(gate: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(gate)


@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [
        (torch.ops.aten.silu_backward, "grad_input", _without_the_slope),
        (fused.F, "silu", _of_the_gate_alone),
    ],
)
def test_a_planted_mistake_shows(place, name, mistake, monkeypatch):
    tensors = inputs()
    expected = run(naive.gated_silu, tensors)
    monkeypatch.setattr(place, name, mistake)
    pairs = zip(run(gated_silu, tensors), expected, strict=True)
    assert max(relative_error(mine, other) for mine, other in pairs) > 1e-2
