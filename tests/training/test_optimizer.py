"""Learning rate and optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.config import Optimizer
from shardwise.training.optimizer import lr_factor, make_lr_schedule, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 warm-up steps of 6: 1/2, 1, then from progress 0, 1/4, 2/4, 3/4.
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rate_of_each_step(schedule, expected):
    cfg = Optimizer(lr=2.0, warmup_steps=2, lr_schedule=schedule)
    assert [lr_factor(cfg, step, 6) for step in range(1, 7)] == pytest.approx(expected)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = make_optimizer(cfg, [("p", parameter)])
    scheduler = make_lr_schedule(cfg, optimizer, 6)
    used = []
    for _ in range(6):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used == pytest.approx([2.0 * factor for factor in expected])


def test_warmup_longer_than_the_run():
    assert [lr_factor(Optimizer(warmup_steps=4), step, 2) for step in (1, 2)] == [0.25, 0.5]


def test_sgd_and_adamw_take_their_settings():
    parameter = nn.Parameter(torch.ones(3))
    sgd = make_optimizer(Optimizer(name="sgd", lr=0.5, weight_decay=0.1), [("p", parameter)])
    parameter.grad = torch.full((3,), 2.0)
    sgd.step()
    torch.testing.assert_close(parameter.data, torch.full((3,), 1 - 0.5 * (2.0 + 0.1)))
    adamw = make_optimizer(Optimizer(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3), [("p", parameter)])
    assert isinstance(adamw, torch.optim.AdamW)
    assert {k: adamw.defaults[k] for k in ("betas", "eps", "weight_decay", "lr")} == {
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "lr": 2e-4,
    }
