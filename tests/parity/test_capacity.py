"""Dropped tokens are not sent, and shares of them are equal under every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.config import RunConfig
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import SEQUENCE, Cell, microbatches, run_config

SPREAD = Cell("qwen3_moe", "ddp-ep", "full", 2, "capacity")


def step(cfg: RunConfig) -> tuple[dict, dict, int, int]:
    """The numbers of a step, the record's summary, the bytes of floats that this rank gives to
    all-to-all, and the width of a row in bytes."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    assert job.routing is not None
    num_bytes, exchange = [0], dist.all_to_all_single

    def counted(result, rows, *args, **kwargs):
        num_bytes.append(rows.nbytes if rows.is_floating_point() else 0)
        return exchange(result, rows, *args, **kwargs)

    dist.all_to_all_single = counted
    result = training_step(job, microbatches(cfg, mesh, 1), mesh, cfg.optimizer.max_grad_norm)
    return (
        dict(result.routing),
        job.routing.summary(),
        sum(num_bytes),
        4 * job.run.hf.config.hidden_size,
    )


def test_what_is_dropped_is_not_sent():
    cfg = run_config(SPREAD)
    ((numbers, summary, _, width),) = run_ranks(1, step, run_config(SPREAD.reference()))
    assert 0.01 < numbers["router_dropped"] < numbers["router_dropped_most"] < 1
    assert numbers["router_dropped_most"] == pytest.approx(max(summary["dropped"]), rel=1e-6)
    choices = SPREAD.rows * SEQUENCE * 2  # of a layer
    for capacity in (cfg.model.expert_capacity, None):
        model = replace(cfg.model, expert_capacity=capacity)
        outcomes = run_ranks(2, step, replace(cfg, model=model))
        dropped = summary["dropped"] if capacity else [0.0] * len(summary["layers"])
        # Rows and what experts made of them, and the gradients of both.
        sent = sum(round(choices * (1 - share)) for share in dropped) * width * 4
        assert sum(num_bytes for *_, num_bytes, _ in outcomes) == sent
        for others, other, *_ in outcomes:
            assert other["dropped"] == pytest.approx(dropped, abs=1e-6)
            assert others["router_dropped"] == pytest.approx(sum(dropped) / len(dropped), abs=1e-6)
