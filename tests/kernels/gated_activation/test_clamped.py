"""The clamped gate equals that of transformers' gpt-oss, and keeps its input alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from shardwise.kernels.gated_activation import clamped
from shardwise.kernels.gated_activation.clamped import clamped_gate
from tests.kernels.gates import error, kept_elements, run
from tests.models.tiny import relative_error

ALPHA, LIMIT = 1.702, 2.0
EPS = {torch.float64: 1e-13, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def ours(x: torch.Tensor) -> torch.Tensor:
    return clamped_gate(x, ALPHA, LIMIT)


def theirs(x: torch.Tensor) -> torch.Tensor:
    experts: Any = SimpleNamespace(alpha=ALPHA, limit=LIMIT)
    return GptOssExperts._apply_gate(experts, x)


def inputs(dtype: torch.dtype = torch.float64, scale: float = 3.0) -> list[torch.Tensor]:
    """Gates and products side by side, of which every third or so is clamped."""
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(5, 7, 18, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_()]


@pytest.mark.parametrize("dtype", EPS)
def test_equals_transformers(dtype):
    assert error(ours, theirs, inputs(dtype)) < EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_of_16_bits_is_transformers(dtype):
    assert torch.equal(ours(*inputs(dtype)), theirs(*inputs(dtype)))


def test_numbers_at_the_limit_and_no_rows():
    x = torch.tensor([[LIMIT, LIMIT, -LIMIT, -LIMIT, 9.0, -9.0]]).double().requires_grad_()
    mine, other = (run(function, [x])[1] for function in (ours, theirs))
    assert relative_error(mine, other) < 1e-14
    assert torch.equal(mine == 0, other == 0)
    assert run(ours, [x.detach()[:0].requires_grad_()])[1].shape == (0, 6)


def test_gradients_are_those_of_small_differences():
    assert torch.autograd.gradcheck(ours, inputs(scale=0.5))


def test_the_backward_keeps_the_input():
    (x,) = inputs()
    assert kept_elements(ours, [x]) == x.numel()
    assert kept_elements(theirs, [x]) == 3 * x.numel()


def test_compiled_code_has_no_breaks():
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert error(compiled, theirs, inputs()) < 1e-13


def halves(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=limit), up.clamp(-limit, limit).add_(1)


def without_limit(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., ::2].clone(), x[..., 1::2] + 1


@pytest.mark.parametrize("mistake", [halves, without_limit])
def test_a_planted_mistake_shows(mistake, monkeypatch):
    expected = run(theirs, inputs())
    monkeypatch.setattr(clamped, "_clamped", mistake)
    pairs = zip(run(ours, inputs()), expected, strict=True)
    assert max(relative_error(mine, other) for mine, other in pairs) > 1e-2
