"""The norm equals autograd's and transformers', and keeps x and a number per row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from shardwise.kernels.rms_norm import fused, naive, rms_norm
from tests.kernels.gates import error, kept_elements, run
from tests.models.tiny import relative_error

EPS = {torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def inputs(
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    needed: tuple[bool, bool] = (True, True),
    rows: tuple[int, ...] = (2, 3, 4),
) -> list[torch.Tensor]:
    """x and weight."""
    generator = torch.Generator().manual_seed(0)
    shapes, dtypes = ((*rows, 6), (6,)), (dtype, weight_dtype or dtype)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        .mul(2)
        .to(kind)
        .requires_grad_(is_needed)
        for shape, kind, is_needed in zip(shapes, dtypes, needed)
    ]


def kernels(offset: float) -> list[partial[torch.Tensor]]:
    """Ours and the naive one."""
    return [partial(kernel, eps=1e-2, offset=offset) for kernel in (rms_norm, naive.rms_norm)]


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_equals_the_naive_one(dtype, weight_dtype, offset):
    tolerance = EPS[dtype] if weight_dtype is None else max(EPS[dtype], 1e-6)
    assert error(*kernels(offset), inputs(dtype, weight_dtype)) < tolerance


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [(), (1,), (2, 3)])
def test_gradients_are_those_of_small_differences(offset, rows):
    assert torch.autograd.gradcheck(kernels(offset)[0], inputs(rows=rows))


@pytest.mark.parametrize("place", range(2))
def test_only_needed_gradients_are_computed(place):
    needed = (place == 0, place == 1)
    assert error(*kernels(1.0), inputs(needed=needed)) < 1e-12


@pytest.mark.parametrize(("norm", "offset"), [(LlamaRMSNorm, 0.0), (Qwen3_5RMSNorm, 1.0)])
def test_equals_transformers(norm, offset):
    x, weight = inputs(torch.float32)
    theirs = norm(6, eps=1e-2)
    theirs.weight = torch.nn.Parameter(weight.detach())
    ours = run(kernels(offset)[0], [x, weight])
    out = theirs(x)
    assert relative_error(ours[0], out) < 1e-6
    out.backward(torch.ones_like(out))
    grad_x, grad_weight = x.grad.clone(), theirs.weight.grad
    x.grad = None
    kernels(offset)[0](x, weight).backward(torch.ones_like(out))
    assert relative_error(x.grad, grad_x) < 1e-5
    assert relative_error(weight.grad, grad_weight) < 1e-5


def test_rows_of_zeros_and_of_large_numbers_give_finite_gradients():
    x, weight = inputs(torch.float32)
    with torch.no_grad():
        x[0], x[1] = 0, 1e15
    assert all(result.isfinite().all() for result in run(kernels(0.0)[0], [x, weight]))


def test_the_backward_keeps_the_inputs_and_a_number_per_row():
    x, weight = inputs(torch.float32)
    kept = x.numel() + weight.numel() + x.numel() // x.shape[-1]
    assert kept_elements(kernels(1.0)[0], [x, weight]) == kept


def _without_the_mean(grad: torch.Tensor, x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    return grad * root


def _without_eps(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.norm(dim=-1, keepdim=True).reciprocal() * x.shape[-1] ** 0.5


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("grad_of_x", _without_the_mean),
        ("inverse_root", _without_eps),
        ("_scaled", lambda x, weight, offset: x * weight),
    ],
)
def test_a_planted_mistake_shows(name, mistake, monkeypatch):
    ours, other = kernels(1.0)
    expected = run(other, inputs())
    monkeypatch.setattr(fused, name, mistake)
    pairs = zip(run(ours, inputs()), expected, strict=True)
    assert max(relative_error(mine, theirs) for mine, theirs in pairs) > 1e-4
