"""Kimi's forget gate: transformers' function, with a gradient that stays finite."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.assembly.build import build
from shardwise.models.load import load_whole, read_config
from shardwise.models.patches.forget_gate import GATES, use_finite_gates
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.models.tiny import tiny
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


@pytest.fixture(scope="module")
def gates() -> tuple[Any, nn.Module]:
    """transformers' gate, and a copy of it with ours."""
    model = load_whole(tiny("tiny-kimi_linear"), read_config(tiny("tiny-kimi_linear")))
    gate = next(module for module in model.modules() if type(module).__name__ in GATES)
    ours = copy.deepcopy(gate)
    use_finite_gates(ours)
    return gate, ours


def value_and_gradients(gate: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    value = gate(hidden)
    return [
        value.detach(),
        *torch.autograd.grad(value.square().sum(), [hidden, *gate.parameters()]),
    ]


def hidden_of(gate: Any, size: float) -> torch.Tensor:
    """Hidden states whose largest input of the softplus is about `size`."""
    hidden = torch.randn(
        2, 5, gate.f_a_proj.in_features, generator=torch.Generator().manual_seed(0)
    )
    return hidden * (size / gate.f_b_proj(gate.f_a_proj(hidden)).max().item())


@pytest.mark.parametrize("size", [0.1, 5.0, 30.0])
def test_equals_transformers_for_ordinary_inputs(gates, size):
    hidden = hidden_of(gates[0], size)
    for ours, theirs in zip(
        value_and_gradients(gates[1], hidden), value_and_gradients(gates[0], hidden), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())


def test_stays_finite_where_transformers_does_not(gates):
    hidden = hidden_of(gates[0], 200.0)
    assert all(tensor.isfinite().all() for tensor in value_and_gradients(gates[1], hidden))
    # Once transformers has mended this, models/patches/forget_gate.py can go.
    assert any(tensor.isnan().any() for tensor in value_and_gradients(gates[0], hidden))


def step_with_large_gates() -> float:
    cfg = run_config(Cell("kimi_linear", "single", "full"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    for name, parameter in job.pm.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.fill_(100.0)
    return training_step(job, microbatches(cfg, mesh, 1), mesh, max_grad_norm=1.0).grad_norm


def test_a_run_with_large_gates_is_trained():
    (norm,) = run_ranks(1, step_with_large_gates)  # NonFiniteLossError, if it is not
    assert 0 < norm < 100
