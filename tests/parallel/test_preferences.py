"""The reference of a step of pairs: the same weights in other layouts, and nothing left changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.config import Preference
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.parallel.preferences import _adapters_off
from shardwise.training.evaluate import evaluate
from shardwise.training.step import forward_backward, training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


def _job(cell: Cell, start: Any) -> tuple[Any, Any, Any]:
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    return cfg, mesh, build(cfg, mesh, start)


def _rewards(cell: Cell) -> list[list[float]]:
    cfg, mesh, job = _job(cell, DrawnStart())
    found = []
    for step in (1, 2):
        result = training_step(job, microbatches(cfg, mesh, step), mesh, None)
        found.append([result.metrics["rewards/chosen"], result.metrics["rewards/rejected"]])
    evaluation = evaluate(job.pm, [microbatches(cfg, mesh, 3)], mesh, 2)
    return [*found, [*evaluation.metrics.values()]]


@pytest.mark.parametrize(
    ("layout", "nproc", "schedule"),
    [("fsdp2", 2, ""), ("tp", 2, ""), ("cp", 2, ""), ("pp", 2, "zbv"), ("fsdp2-cp", 4, "")],
)
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_rewards_are_those_of_one_process(layout, nproc, schedule, mode):
    cell = Cell("llama", layout, mode, nproc, "dpo", schedule)
    (expected,) = run_ranks(1, _rewards, cell.reference())
    for found in run_ranks(nproc, _rewards, cell):
        for numbers, others in zip(found, expected, strict=True):
            assert numbers == pytest.approx(others, rel=1e-4, abs=1e-5)


def _values_before_and_after(cell: Cell) -> None:
    cfg, mesh, job = _job(cell, DrawnStart())
    for step in (1, 2):  # after the first step what is trained differs from the reference
        before = {n: full_tensor(p).clone() for n, p in job.pm.named_parameters()}
        needs_grad = [p.requires_grad for _, p in job.pm.named_parameters()]
        forward_backward(job.pm, microbatches(cfg, mesh, step), mesh)
        for name, parameter in job.pm.named_parameters():
            assert torch.equal(full_tensor(parameter), before[name]), name
        assert [p.requires_grad for _, p in job.pm.named_parameters()] == needs_grad
        training_step(job, microbatches(cfg, mesh, step), mesh, None)


@pytest.mark.parametrize("variant", ["dpo", "dpo-start"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2"])
def test_the_pass_of_the_reference_leaves_weights_as_they_are(variant, layout):
    run_ranks(2, _values_before_and_after, Cell("llama", layout, "lora", 2, variant))


def _differences() -> None:
    """The base is what the model computes without adapters; a start is what it was."""
    cfg, mesh, job = _job(Cell("llama", "single", "lora", 1, "dpo"), DrawnStart())
    training = replace(cfg.training, objective="orpo")
    plain = build(replace(cfg, lora=None, training=training, preference=Preference()), mesh)
    (part,), (base,) = job.pm.parts, plain.pm.parts
    (batch, *_) = microbatches(cfg, mesh, 1)
    part.eval(), base.eval()
    layers = [module for module in part.modules() if hasattr(module, "disable_adapters")]
    assert len(layers) > 10
    with torch.no_grad():
        logits = part(batch, return_logits=True)
        with _adapters_off(layers):
            without = part(batch, return_logits=True)
        assert torch.equal(without, base(batch, return_logits=True))
        assert not torch.equal(logits, without)
        assert torch.equal(part(batch, return_logits=True), logits)


def test_the_base_is_the_model_without_adapters():
    run_ranks(1, _differences)


def _first_rewards() -> list[float]:
    cfg, mesh, job = _job(Cell("llama", "single", "lora", 1, "dpo-start"), DrawnStart())
    return [*training_step(job, microbatches(cfg, mesh, 1), mesh, None).metrics.values()]


def test_a_start_is_what_the_files_say_and_not_the_state():
    """`DrawnStart` gives adapters other values than a run begins with, as a resume does."""
    (metrics,) = run_ranks(1, _first_rewards)
    assert metrics[0] != 0.0


def _sums_of_the_reference(cell: Cell, rate: float) -> list[torch.Tensor]:
    cfg = run_config(cell)
    cfg = replace(cfg, model=replace(cfg.model, router_bias_rate=rate))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    found = []
    for step in (1, 2, 3):
        batches = microbatches(cfg, mesh, 3)
        sums = job.pm.objective.reference_pass(job.pm, batches)
        found.append(torch.stack([sums[batch.slots].logps for batch in batches[:1]]))
        training_step(job, microbatches(cfg, mesh, step), mesh, None)
    return found


@pytest.mark.parametrize(
    ("family", "mode", "variant", "rate"),
    [
        ("llama", "lora", "dpo", 0.0),
        ("llama", "lora", "dpo-start", 0.0),
        ("qwen3_5_text", "full", "kto", 0.0),
        ("deepseek_v3", "full", "dpo", 0.2),
    ],
)
def test_the_reference_is_the_same_in_every_step(family, mode, variant, rate):
    """Whatever a step moves: weights, adapters, biases of routers."""
    cell = Cell(family, "single", mode, 1, variant)
    (found,) = run_ranks(1, _sums_of_the_reference, cell, rate)
    for sums in found[1:]:
        assert torch.equal(sums, found[0])
