"""Gradients of what decays are made of, at strong ones and at weak ones: the chunked cores in
float32 against a plain recurrence, token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

ROWS, HEADS, SIZE = 2, 3, 8
Inputs = dict[str, torch.Tensor]


def delta_rule(core: Callable[..., Any], x: Inputs, documents: Any, channels: int) -> torch.Tensor:
    """Gated DeltaNet, Jet-Nemotron's block and KDA: g = -e^A_log softplus(gate)."""
    g = -x["a_log"].exp()[:, None] * F.softplus(x["gate"][..., :channels])
    beta = x["beta"].sigmoid()
    g = g if channels > 1 else g[..., 0]
    return core(x["q"], x["k"], x["v"], g, beta, None, documents)[0]


def gated(core: Any, x: Inputs, documents: Any) -> torch.Tensor:
    return delta_rule(core.gated_delta_rule, x, documents, channels=1)


def kimi(core: Any, x: Inputs, documents: Any) -> torch.Tensor:
    return delta_rule(core.kimi_delta_attention, x, documents, channels=SIZE)


def mamba2(core: Any, x: Inputs, documents: Any) -> torch.Tensor:
    dt, a = F.softplus(x["gate"][..., 0]), -x["a_log"].exp()
    return core.mamba2_scan(x["v"], dt, a, x["k"], x["q"], x["d"], None, documents)[0]


def mamba(core: Any, x: Inputs, documents: Any) -> torch.Tensor:
    a = -x["a_log"].exp()[:, None].expand(-1, SIZE)
    dt, b, c = x["gate"][..., 0], x["k"][:, :, 0], x["q"][:, :, 0]
    v, z = x["v"][..., 0], x["v"][..., 1]
    return core.selective_scan(v, dt, a, b, c, x["d"], z, x["bias"], None, documents)[0]


CORES = {
    "gated_delta_rule": gated,
    "kimi_delta_attention": kimi,
    "state_space_duality": mamba2,
    "selective_scan": mamba,
}


def drawn(tokens: int, gate: float, rate: float, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shape = ROWS, tokens, HEADS
    return {
        **{name: normal(*shape, SIZE) for name in ("q", "k", "v")},
        "gate": gate * (2 * torch.rand(*shape, SIZE, generator=generator) - 1),
        "beta": normal(*shape),
        "a_log": (rate * torch.rand(HEADS, generator=generator) + 1e-3).log(),
        "d": normal(HEADS),
        "bias": normal(HEADS),
    }


def gradients(
    run: Callable[..., torch.Tensor], core: Any, x: Inputs, documents: Any, dtype: torch.dtype
) -> Inputs:
    leaves = {name: value.to(dtype).requires_grad_() for name, value in x.items()}
    out = run(core, leaves, documents)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [*leaves.values()], allow_unused=True)
    return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}


@pytest.mark.parametrize("name", CORES)
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 63, 65, 100]),
    st.floats(0, 30),
    st.sampled_from([0.01, 1.0, 16.0, 300.0]),
    st.booleans(),
    st.integers(0, 99),
)
@example(65, 30.0, 16.0, False, 0)
@example(65, 30.0, 16.0, True, 0)
@example(100, 1.0, 300.0, False, 0)
def test_gradients_are_right_however_strong_decays_are(name, tokens, gate, rate, cut, seed):
    run = CORES[name]
    naive, chunked = (
        import_module(f"shardwise.kernels.{name}.{form}") for form in ("naive", "chunked")
    )
    x = drawn(tokens, gate, rate, seed)
    documents = (torch.arange(tokens) // 40).expand(ROWS, -1) if cut else None
    expected = gradients(run, naive, x, documents, torch.float64)
    ours = gradients(run, chunked, x, documents, torch.float32)
    assert ours.keys() == expected.keys()
    bound = 2e-5
    if name == "state_space_duality":
        # A decay between two tokens is a difference of sums over a chunk, each of them rounded.
        sums = (F.softplus(x["gate"][..., 0]) * x["a_log"].exp()).sum(1).detach()
        bound += torch.finfo(torch.float32).eps * float(sums.max())
    # A gradient that has all but decayed is a sum of larger terms, which cancel in float32.
    floor = 1e-12 * max(1.0, *(float(right.abs().max()) for right in expected.values()))
    for key, right in expected.items():
        assert (ours[key] - right).abs().max() <= bound * right.abs().max() + floor, key
