"""The arguments that mamba_ssm's kernels get on a GPU mean what the torch path computes.

The kernels themselves need a GPU. The stand-in is written from their source, in plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise.kernels.state_space_duality as package
from shardwise.kernels.state_space_duality import backend, mamba2_scan, naive
from tests.kernels.mamba_ssm import install
from tests.kernels.recurrences import run
from tests.kernels.state_space_duality.test_chunked import documents_of, inputs
from tests.models.tiny import relative_error

CUDA = torch.device("cuda")
# mamba_ssm 2.3.2, mamba_ssm/ops/triton/ssd_combined.py
SIGNATURE = (
    "(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, "
    "seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), "
    "return_final_states=False, return_varlen_states=False)"
)
BF16 = 2 * torch.finfo(torch.bfloat16).eps
"""Of what is rounded to 16 bits once on each side."""


def kernel(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute: of heads that share a group one after the other, and a state
    [B, N, H, S] that is kept from one token to the next if `seq_idx` is the same; it is 0 before
    the first token.
    """
    assert given["x"].dtype == given["B"].dtype == given["C"].dtype
    assert given["z"] is given["dt_bias"] is given["cu_seqlens"] is None
    assert not given["dt_softplus"]
    assert given["return_final_states"]
    x, dt, a, b, c, d = (given[name].float() for name in ("x", "dt", "A", "B", "C", "D"))
    batch, tokens, heads, size = x.shape
    assert dt.shape == (batch, tokens, heads)
    assert a.shape == d.shape == (heads,)
    b, c = (y.repeat_interleave(heads // y.shape[2], 2) for y in (b, c))
    numbers = given["seq_idx"]
    goes_on = torch.ones(batch, tokens)
    if numbers is not None:
        assert numbers.dtype == torch.int32
        goes_on = (numbers == F.pad(numbers[:, :-1], (1, 0))).float()
    state = given["initial_states"]
    if state is None:
        state = torch.zeros(batch, heads, size, b.shape[-1])
    assert state.shape == (batch, heads, size, b.shape[-1])
    state, outs = state.float(), []
    for t in range(tokens):
        left = (dt[:, t] * a).exp() * goes_on[:, t, None]
        written = torch.einsum("bn,bnh,bns->bnhs", dt[:, t], x[:, t], b[:, t])
        state = state * left[..., None, None] + written
        outs.append(torch.einsum("bnhs,bns->bnh", state, c[:, t]) + d[:, None] * x[:, t])
    return torch.stack(outs, 1).to(given["x"].dtype), state


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Pretend that mamba_ssm is installed and tensors are on a GPU; give the kernels' calls."""
    monkeypatch.setattr(package, "backend", lambda _, dtype: backend(CUDA, dtype))
    module = "mamba_ssm.ops.triton.ssd_combined"
    return install(monkeypatch, module, "mamba_chunk_scan_combined", SIGNATURE, kernel)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("with_state", [True, False])
def test_documents_and_states_reach_the_kernel(with_state, share, calls):
    tensors = [x.detach().bfloat16().requires_grad_() for x in inputs(20)]
    for place in (1, 2, 6):  # the time step, its factor and the state
        tensors[place] = tensors[place].detach().float().requires_grad_()
    state = [] if with_state else [None]
    tensors = tensors if with_state else tensors[:-1]
    documents = documents_of(2, 20, share)
    others = (*state, documents)
    results = run(mamba2_scan, tensors, *others)
    assert len(calls) == 1
    assert [x.dtype for x in results[:2]] == [torch.bfloat16, torch.float32]
    expected = run(naive.mamba2_scan, tensors, *others)
    for mine, other in zip(results, expected):
        assert relative_error(mine.float(), other.float()) < BF16


def test_what_the_kernels_do_not_take_is_torchs(calls, monkeypatch):
    mamba2_scan(*inputs(5, dtype=torch.float32))
    monkeypatch.setattr(package, "backend", backend)
    mamba2_scan(*inputs(5, dtype=torch.bfloat16))  # on a CPU
    assert calls == []


def test_under_autocast_the_kernel_gets_16_bits_of_a_wider_x(calls):
    """Falcon-H1 multiplies what goes in by a buffer in float32."""
    tensors = [x.detach().requires_grad_() for x in inputs(20, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = mamba2_scan(*tensors)
    assert [given["x"].dtype for given in calls] == [torch.bfloat16]
    expected, _ = naive.mamba2_scan(*tensors)
    assert out.dtype == torch.float32
    assert relative_error(out, expected) < BF16
