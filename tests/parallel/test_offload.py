"""Offload: the optimizer's copies are distinct from the weights, and follow them when they are
loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.assembly.build import Job, build
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor, local
from shardwise.training.step import forward_backward, training_step
from tests.distributed import run_ranks
from tests.parity.harness import (
    TOLERANCE,
    Cell,
    Outcome,
    compare,
    microbatches,
    run,
    run_config,
    verdict,
)


def _job(offload: str, mode: str = "full") -> tuple[Job, Any, Any]:
    cfg = run_config(Cell("llama", "fsdp2", mode, 2, f"offload-{offload}"), optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    return build(cfg, mesh), cfg, mesh


def _updated(job: Job) -> dict[str, torch.Tensor]:
    return {
        n: p
        for group in job.optimizer.param_groups
        for n, p in zip(group["param_names"], group["params"])
    }


def _distinct() -> tuple[bool, bool, bool]:
    job, cfg, mesh = _job("optimizer")
    weights, copies = dict(job.pm.named_parameters()), _updated(job)
    apart = all(
        local(weights[n]).data_ptr() != local(copy).data_ptr() for n, copy in copies.items()
    )
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    moved = all(weights[n].grad is None and copy.grad is not None for n, copy in copies.items())
    job.optimizer.zero_grad(set_to_none=True)
    training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    return (
        apart,
        moved,
        all(torch.equal(local(weights[n]), local(copy)) for n, copy in copies.items()),
    )


def test_gradients_go_to_copies_and_updates_come_back():
    assert run_ranks(2, _distinct) == [(True, True, True)] * 2


def _loaded(offload: str) -> bool:
    job, cfg, mesh = _job(offload)
    training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    copies = _updated(job)
    right = True
    for name, weight in job.pm.named_parameters():
        new = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
        job.pm.from_portable(name, weight, new)
        moment = job.optimizer.state[copies[name]]["exp_avg"]
        job.pm.from_portable(
            name, moment, job.pm.to_portable(name, moment) + 1
        )  # must leave the weight alone
        right &= torch.equal(full_tensor(job.pm.to_portable(name, weight)), new)
        right &= torch.equal(full_tensor(copies[name].detach()), new)
    return right


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_copies_follow_weights_that_are_loaded(offload):
    assert all(run_ranks(2, _loaded, offload))


def _run_with(cell: Cell, offload: Any) -> Outcome:
    cfg = run_config(cell)
    cfg = replace(cfg, parallel=replace(cfg.parallel, offload=offload))
    return run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))


@pytest.mark.parametrize(
    ("layout", "nproc", "offload"),
    [("pp", 2, "optimizer"), pytest.param("pp-fsdp2", 4, "all", marks=pytest.mark.slow)],
)
def test_gradients_of_a_tied_weight_are_added_up_before_they_are_taken(layout, nproc, offload):
    """Its two stages are on two ranks, of which one counts it in the norm."""
    cell = Cell("qwen3_5_text", layout, "full", nproc, "tied", "1f1b")
    expected = run_ranks(1, _run_with, cell.reference(), "none")[0]
    errors = compare(run_ranks(nproc, _run_with, cell, offload), expected)
    assert not verdict(errors, TOLERANCE), errors


def test_one_process_trains_with_its_optimizer_on_the_cpu():
    cell = Cell("qwen3_5_text", "single", "full", 1)
    expected, outcome = (
        run_ranks(1, _run_with, cell, offload)[0] for offload in ("none", "optimizer")
    )
    assert not verdict(compare((outcome,), expected), TOLERANCE)
