"""The arguments that mamba_ssm's kernel gets on a GPU mean what the torch path computes.

The kernel itself needs a GPU. The stand-in is written from its source, in plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise.kernels.selective_scan as package
from shardwise.kernels.selective_scan import backend, naive, selective_scan
from tests.kernels.mamba_ssm import install
from tests.kernels.recurrences import weighed
from tests.kernels.selective_scan.test_chunked import inputs
from tests.models.tiny import relative_error

CUDA = torch.device("cuda")
# mamba_ssm 2.3.2, mamba_ssm/ops/selective_scan_interface.py
SIGNATURE = (
    "(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
    "return_last_state=False)"
)


def kernel(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes, of inputs with tokens last, and the dtypes that it checks."""
    assert {given[name].dtype for name in ("delta", "B", "C", "z")} == {given["u"].dtype}
    assert {given[name].dtype for name in ("A", "D", "delta_bias")} == {torch.float32}
    assert given["return_last_state"]
    u, dt, b, c, z = (given[name].float() for name in ("u", "delta", "B", "C", "z"))
    dt = dt + given["delta_bias"][:, None]
    if given["delta_softplus"]:
        dt = F.softplus(dt)
    state, outs = torch.zeros(len(u), *given["A"].shape), []
    for t in range(u.shape[2]):
        state = state * torch.exp(dt[:, :, t, None] * given["A"])
        state = state + (dt * u)[:, :, t, None] * b[:, None, :, t]
        outs.append((state * c[:, None, :, t]).sum(-1))
    out = (torch.stack(outs, 2) + given["D"][:, None] * u) * F.silu(z)
    return out.to(given["u"].dtype), state


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Pretend that mamba_ssm is installed and tensors are on a GPU; give the kernel's calls."""
    monkeypatch.setattr(package, "backend", lambda _, dtype: backend(CUDA, dtype))
    module = "mamba_ssm.ops.selective_scan_interface"
    return install(monkeypatch, module, "selective_scan_fn", SIGNATURE, kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_state_or_documents_are_the_kernels(dtype, calls):
    tensors = [x.detach().to(dtype).requires_grad_() for x in inputs(20)[:-1]]
    out, last = selective_scan(*tensors)
    assert len(calls) == 1
    assert out.dtype == dtype
    assert not last.requires_grad  # the kernel has no gradient of it
    expected, _ = naive.selective_scan(*tensors)
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    gradients = [torch.autograd.grad(weighed(y), tensors) for y in (out, expected)]
    for mine, other in zip((out, *gradients[0]), (expected, *gradients[1])):
        assert relative_error(mine.float(), other.float()) < tolerance


def test_what_the_kernel_does_not_take_is_torchs(calls, monkeypatch):
    *tensors, state = inputs(5, dtype=torch.float32)
    selective_scan(*tensors, state)
    selective_scan(*tensors, None, torch.zeros(2, 5, dtype=torch.int64))
    selective_scan(*(x.double() for x in tensors))
    monkeypatch.setattr(package, "backend", backend)
    selective_scan(*tensors)  # on a CPU
    assert calls == []
