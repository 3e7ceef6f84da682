"""A step and an evaluation with NaN name the weights or gradients of any rank, and a way out."""

from __future__ import annotations

import pytest
import torch

from shardwise.assembly.build import Job, build
from shardwise.config import UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import local
from shardwise.training.evaluate import evaluate
from shardwise.training.not_finite import NotFinite, explain
from shardwise.training.step import NonFiniteLossError, training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config

NAME = "model.layers.2.mlp.up_proj.weight"


def failed_step(cell: Cell, where: str) -> tuple[NotFinite, str, str]:
    """Put a NaN into one weight or gradient and return what the first step finds.

    Beside it are the messages for a first step and for a later one.
    """
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    for name, parameter in job.pm.named_parameters():
        if NAME in name.replace(".base_layer", "") and local(parameter).numel():
            if where == "weights":
                local(parameter.detach()).view(-1)[0] = torch.nan
            else:
                parameter.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteLossError) as raised:
        training_step(job, microbatches(cfg, mesh, 1), mesh, max_grad_norm=1.0)
    found = raised.value.found
    return (
        found,
        explain(found, just_loaded=True, trained=False),
        explain(found, just_loaded=False, trained=True),
    )


@pytest.mark.parametrize(
    "cell",
    [
        Cell("llama", "single", "lora"),
        Cell("llama", "fsdp1", "full", 2),
        Cell("llama", "fsdp2", "full", 2),
        Cell("llama", "zero2", "full", 2),
        Cell("llama", "tp", "lora", 2),
        Cell("llama", "pp", "full", 2, schedule="1f1b"),
    ],
    ids=lambda cell: cell.id,
)
def test_a_weight_is_named_on_every_rank(cell):
    messages = run_ranks(cell.nproc, failed_step, cell, "weights")
    assert len({(first, later) for _, first, later in messages}) == 1
    _, first, later = messages[0]
    for line in (first, later):
        assert NAME in line  # as it is called in the file, whatever PEFT has wrapped
        assert "more" not in line
    assert "as they were loaded" in first
    assert "optimizer.lr" not in first
    assert "optimizer.lr" in later


def test_a_gradient_is_named():
    ((found, first, later),) = run_ranks(
        1, failed_step, Cell("llama", "single", "full"), "gradients"
    )
    assert found == NotFinite((), (NAME,))  # and no other was scaled by a norm that is NaN
    assert f"all weights are finite, gradients {NAME} are not" in first
    assert "optimizer.lr" not in first
    assert "optimizer.lr" in later


def evaluated(step: int) -> str:
    cfg = run_config(Cell("llama", "single", "full"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job: Job = build(cfg, mesh)
    dict(job.pm.named_parameters())[NAME].data.fill_(torch.nan)
    with pytest.raises(UserError) as raised:
        evaluate(job.pm, [microbatches(cfg, mesh, 1)], mesh, step)
    return str(raised.value)


@pytest.mark.parametrize(("step", "advice"), [(0, "as they were loaded"), (4, "optimizer.lr")])
def test_an_evaluation_names_the_weight(step, advice):
    (line,) = run_ranks(1, evaluated, step)
    assert NAME in line
    assert advice in line
