"""Muon on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.assembly.optimizer import make_optimizer
from shardwise.config import Optimizer
from shardwise.models.families import spec_of
from shardwise.models.weights import matrices_of
from shardwise.parallel.muon import _newton_schulz
from tests.models.tiny import on_meta, tiny


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_a_step_is_that_of_torch(shape):
    """Three steps of a matrix by torch.optim.Muon, and of a vector by AdamW; both in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator), torch.randn(5, generator=generator)
    ours, theirs = ([nn.Parameter(value.clone()) for value in drawn] for _ in range(2))
    cfg = Optimizer(name="muon", lr=0.1, weight_decay=0.1)
    optimizer = make_optimizer(cfg, [*zip(("w", "b"), ours)], {"w"}, {"w"})
    matrix = torch.optim.Muon(
        theirs[:1], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    vector = torch.optim.AdamW(theirs[1:], lr=0.1, weight_decay=0.0, fused=True)
    for _ in range(3):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step()
        matrix.step()
        vector.step()
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert {*optimizer.state[ours[0]]} == {"momentum_buffer"}
    assert {*optimizer.state[ours[1]]} == {"exp_avg", "exp_avg_sq", "step"}


def test_each_matrix_of_a_stack_is_orthogonalised_by_itself():
    stack = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))
    together = _newton_schulz(stack)
    for matrix, update in zip(stack, together):
        torch.testing.assert_close(_newton_schulz(matrix), update)
        values = torch.linalg.svdvals(update)
        assert values.min() > 0.3
        assert values.max() < 1.3


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3_next"])
def test_matrices_are_weights_of_layers(name):
    hf = on_meta(tiny(name))
    names = matrices_of(hf, spec_of(hf.config, hf))
    rest = {name for name, _ in hf.named_parameters()} - names
    assert any(name.endswith("q_proj.weight") for name in names)
    for part in ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias"):
        assert not any(part in name for name in names)
    if name == "tiny-qwen3_next":
        assert any(name.endswith("experts.gate_up_proj") for name in names)
        assert any(name.endswith("mlp.gate.weight") for name in rest)
        assert any(name.endswith("in_proj_ba.weight") for name in rest)
