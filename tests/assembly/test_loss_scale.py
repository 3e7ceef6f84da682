"""The loss scale, and what a step does when gradients overflow on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.assembly.loss_scale import GROWTH_STEPS, INITIAL_SCALE, LossScale
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor, local
from shardwise.training.step import NonFiniteLossError, training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config


def test_scale_falls_with_an_overflow_and_grows_after_many_good_steps():
    scale = LossScale.of("float16")
    assert scale.update(finite=False)
    assert scale.scale == INITIAL_SCALE / 2
    for _ in range(GROWTH_STEPS - 1):
        assert scale.update(finite=True)
    assert scale.scale == INITIAL_SCALE / 2
    again = LossScale.of("float16")
    again.load_state_dict(scale.state_dict())  # one step before it grows
    again.update(finite=True)
    assert (again.scale, again.good_steps) == (INITIAL_SCALE, 0)


def test_scale_gives_up_below_one():
    scale = LossScale(dynamic=True, scale=2.0)
    assert scale.update(finite=False)  # 1
    assert not scale.update(finite=False)


def test_other_precisions_have_no_scale():
    for precision in ("float32", "bfloat16"):
        scale = LossScale.of(precision)
        for _ in range(GROWTH_STEPS):
            assert scale.update(finite=True)
        assert scale.scale == 1.0
        assert not scale.update(finite=False)  # nothing to lower: a failure at once


def _overflow_on_one_rank(layout: str, rank: int) -> tuple[bool, float, bool, list[bool], float]:
    schedule = "1f1b" if layout.startswith("pp") else ""
    cell = Cell("llama", layout, "full", dist.get_world_size(), "float16", schedule)
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    before = [full_tensor(p.detach()).clone() for p in job.trainable()]

    def overflow() -> None:  # after all reductions, so that nothing has told the other ranks
        names = [name for name, _ in job.pm.named_parameters() if "q_proj" in name]
        gradient = dict(job.pm.named_parameters())[names[-1]].grad
        assert gradient is not None
        if dist.get_rank() == rank:
            local(gradient).view(-1)[0] = torch.inf

    pm = replace(job.pm, reduce_grads=(*job.pm.reduce_grads, overflow))
    rate = job.optimizer.param_groups[0]["lr"]
    result = training_step(replace(job, pm=pm), microbatches(cfg, mesh, 1), mesh, 1.0)
    kept = all(torch.equal(full_tensor(p.detach()), old) for p, old in zip(job.trainable(), before))
    falls = job.optimizer.param_groups[0]["lr"] < rate
    after = training_step(job, microbatches(cfg, mesh, 2), mesh, 1.0)
    return result.skipped, job.loss_scale.scale, kept, [falls, after.skipped], after.loss


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [("fsdp2", 2), ("tp", 2), ("pp", 2), ("fsdp2-tp", 4), ("pp-tp", 4), ("fsdp2-cp", 4)],
)
def test_overflow_in_one_shard_skips_the_step_on_every_rank(layout, num_ranks):
    for skipped, scale, kept, (falls, skipped_again), loss in run_ranks(
        num_ranks, _overflow_on_one_rank, layout, num_ranks - 1
    ):
        assert skipped
        assert kept  # weights; AdamW would move each by lr even where the gradient is finite
        assert scale == INITIAL_SCALE / 2
        assert falls  # the schedule goes on
        assert not skipped_again
        assert 5 < loss < 6  # of 256 tokens, ln 256 = 5.5: the next step has whole weights


def _not_finite(precision: str) -> None:
    cfg = run_config(Cell("llama", "single", "full", 1, "float16"))
    cfg = replace(cfg, training=replace(cfg.training, precision=precision))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    with torch.no_grad():
        job.trainable()[-1].fill_(torch.nan)
    with pytest.raises(NonFiniteLossError):
        training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_loss_that_is_not_finite_is_a_failure_at_any_scale(precision):
    run_ranks(1, _not_finite, precision)
